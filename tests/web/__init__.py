"""What `tensortap view` and `tensortap report` show, in a real browser."""
