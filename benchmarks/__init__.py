"""Speed measured side by side, after correctness: `python -m benchmarks`.

Threads matter more than anything else here: a loop over small matrices gains nothing from several
and may lose a hundredfold on a busy machine. Run it with `OMP_NUM_THREADS=1` as well.
"""
