"""The model types for which the facts are known to hold: see `attnprobe.architecture.facts`.

Of these, a scale, mask or bias that is not as the facts say is a mismatch. Of others it may as well
be that the facts are not all, and what departs from them is said not to be checked. Types are left
out that may be given images or sound, and those with modes of attention that no small model here
met.
"""

_NAMES = """
afmoe albert apertus arcee axk1 bailing_hybrid bamba bart beam bert bert-generation big_bird
biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe ctrl
cwm data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama distilbert dory dots1 electra ernie
ernie4_5 ernie4_5_moe esm esmc eurobert exaone exaone4 exaone_moe falcon falcon_h1 flex_olmo flint
gemma gemma2 glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss
gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte helium
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax ibert internlm3 iquestcoder jais2 jamba jetmoe
jina_embeddings_v3 kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama longcat_flash
luke m2m_100 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 ministral
ministral3 mistral mixtral mobilebert modernbert modernbert-decoder mpnet mpt mt5 mvp nanochat
nemotron nemotron_h nllb-moe nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus
persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer sarvam_mla
sarvam_moe seed_oss smollm3 solar_open squeezebert stablelm starcoder2 switch_transformers t5
trocr ultrabert umt5 vaultgemma xglm xlm-roberta xlm-roberta-xl xmod youtu zamba zamba2 zaya
"""

KNOWN_TYPES = frozenset(_NAMES.split())
"""Verified in `mask` and `output` by the sweep whose table is docs/architectures.md."""
