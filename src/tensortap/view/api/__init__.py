"""What the page asks and the report embeds: one function a request, from a run to plain values or binary columns."""
