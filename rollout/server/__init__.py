"""The front door: the aiohttp application and what stands right behind it."""
