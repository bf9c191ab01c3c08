"""The only HTTP door of the platform."""
