"""Rooms shared by the services; rooms only, no loose modules."""
