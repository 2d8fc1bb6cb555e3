"""Where the processes of a run live: this machine, Ray, Slurm, Kubernetes."""
