"""The experiments of Brunner et al. 2020, "On Identifiability in Transformers", on any encoder.

python -m examples.paper                                 # all of them, on a packaged encoder
python -m examples.paper --model FOLDER --data FILE --limit 500 --out RESULTS
python -m examples.paper.attribution --data FILE         # one of them
"""
