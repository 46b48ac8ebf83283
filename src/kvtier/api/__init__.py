"""HTTP for engines: the APIs of OpenAI, Anthropic and Ollama, and the page. The only asyncio in the project."""
