"""Other engines' interfaces, served by tidekv's parts. Each module needs the engine that it is for."""
