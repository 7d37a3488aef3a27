"""What a layout needs of each rank, before anything starts: counted parameters, and a model of memory."""
