"""Pieces that every Triton kernel shares, and how they are launched."""
