"""Tests that start real servers on loopback, and what they share."""
