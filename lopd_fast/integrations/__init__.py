"""Drop-ins for the trainers that people already run. Each is imported by name, and needs its own extra."""
