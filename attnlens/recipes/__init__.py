"""What each command computes, as functions of Python: model and texts in, result out.

Each takes a model or its name, and texts: `head_report.report_heads`, `demonstration.report_demo`,
`sentence.attribute_sentence`, `identification.identify_texts`, `text_drift.compare_on_texts`,
`head_choice.choose_heads`, `corpus_scan.scan_corpus`, `compatibility.check_model`.

from attnlens.recipes.head_report import report_heads

report_heads("bert-base-uncased", texts).statistics.effective_fraction  # [L, H]
"""
