"""The load generator: `fdfo bench` and `fdfo replay`. Importing it needs the base alone, running it the extra `bench`.

workload    what is sent, and when: lengths, datasets, traces
load        sends it and keeps a record of each request
measure     a load against live schedulers, or anything else that streams and counts
metrics     figures from records and counters
report      the figures as a table and as JSON; page and plots: as HTML
progress    what a person sees meanwhile
virtual     servers in this process, under the clock of virtual_time; needs the services' extras too
cli         flags
"""
