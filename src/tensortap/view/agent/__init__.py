"""Short answers about a run, for a language model or a person: `tensortap explain` and the MCP server `tensortap mcp`.

May import what the other views import: the store, the rules and the comparison of runs. The MCP SDK is imported only
by `server.py`.
"""
