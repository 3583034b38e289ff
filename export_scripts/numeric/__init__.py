"""Number types of weights by name, and arrays of them with torch's rounding.

Nothing here knows files, formats or models.
"""
