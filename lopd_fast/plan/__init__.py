"""What a run will need, before anything loads: `make.py` plans, the others serve it."""
