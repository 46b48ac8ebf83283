"""HTTP for engines: OpenAI's and Ollama's APIs. The only asyncio in the project."""
