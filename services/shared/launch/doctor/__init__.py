"""`stillhouse doctor`: checks of the host, its devices and its packages."""
