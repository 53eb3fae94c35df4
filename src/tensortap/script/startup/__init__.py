"""What Python runs at its start where `tensortap env` put this folder on its path. Imports nothing of ours at first."""
