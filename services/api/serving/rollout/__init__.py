"""Following promotions: loading a student, checking its golden outputs, switching to it."""
