"""Where training processes are started: a launcher turns a plan into a run to watch and end."""
