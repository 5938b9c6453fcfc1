"""Data: sources of text, the token cache, and the batches of a run.

`embedlab.data.kinds` says what a row of each kind of data has; `build.build_token_table` tokenises it once;
`module.SentenceDataModule` gives a trainer the batches; `rows.iter_texts` reads the raw text.
"""
