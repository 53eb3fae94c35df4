"""Where finished steps go besides the run folder."""
