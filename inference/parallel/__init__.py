"""Ranks, groups, and linears cut among ranks; nothing here knows about layers."""
