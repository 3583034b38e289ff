"""Number types of weights by name, and arrays of them with torch's rounding."""
