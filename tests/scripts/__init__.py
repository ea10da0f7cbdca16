"""Tests of the measuring scripts, which are no part of the package."""
