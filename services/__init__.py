"""Stillhouse: fine-tune a large classifier, distil it, serve the student, and tell the truth about memory."""
