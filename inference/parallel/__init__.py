"""Ranks, their groups, and linears divided among ranks; independent of layers and models."""
