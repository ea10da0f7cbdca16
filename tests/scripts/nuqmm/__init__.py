"""Tests of nuQmm's tables."""
