"""An MCP server with one tool, over standard input and output: `python tool_mcp_server.py`."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
async def calculator(expression: str) -> int:
    """Multiply, add and subtract whole numbers, as "12*34+5"."""
    terms = expression.replace("-", "+-").split("+")
    products = ([int(factor) for factor in term.split("*")] for term in terms)
    return sum(left * (right[0] if right else 1) for left, *right in products)


if __name__ == "__main__":
    server.run("stdio")
