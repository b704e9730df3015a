"""What plugs attngen into other libraries; each module imports the library that it serves."""
