"""What a page says, in each language that it speaks: English, Traditional Chinese, Japanese."""

from __future__ import annotations

from attnprobe.errors import InputError

LANGUAGES = ("en", "zh-Hant", "ja")

_OTHER_NAMES = {"zh-TW": "zh-Hant"}

# A row for each message, a column for each language. `{name}` is filled in. Terms are those of
# textbooks in Taiwan and Japan: a row of a matrix is 列 in Taiwan and 行 in Japan.
MESSAGES: dict[str, tuple[str, str, str]] = {
    "title": (
        "Attention, step by step",
        "注意力機制：逐步計算",
        "アテンションの計算を一歩ずつ",
    ),
    "note": (
        "Each step is computed here in float64 from the query, key and value of {model}, "
        "which ran in {dtype}.",
        "{model} 以 {dtype} 執行；每一步都由它的查詢（query）、鍵（key）、值（value）"
        "向量在此頁以 float64 算出。",
        "各ステップは、{dtype} で動いた {model} のクエリ（query）・キー（key）・バリュー（value）"
        "から、このページが float64 で計算します。",
    ),
    "model": ("the model", "此模型", "このモデル"),
    "layer": ("Layer", "層", "層"),
    "head": ("Head", "注意力頭", "ヘッド"),
    "numbers": ("Numbers", "顯示數值", "数値を表示"),
    "theme": ("Light / dark", "淺色／深色", "ライト／ダーク"),
    "sentence": ("Sentence: choose a word", "句子：選擇一個詞", "文：単語を選ぶ"),
    "strips": ("Steps for each token", "每個詞元（token）的各步驟", "各トークンのステップ"),
    "output": ("The head's output", "注意力頭的輸出", "ヘッドの出力"),
    "headline": (
        "Layer {layer}, head {head}: where “{word}” looks",
        "第 {layer} 層、第 {head} 頭：「{word}」關注哪些詞",
        "第 {layer} 層、ヘッド {head}：「{word}」が注目する先",
    ),
    "several": (
        "“{word}” is {count} tokens; its query is that of the last one, “{token}”.",
        "「{word}」由 {count} 個詞元（token）組成，使用最後一個詞元「{token}」的查詢向量。",
        "「{word}」は {count} 個のトークンからなり、最後のトークン「{token}」のクエリを使います。",
    ),
    "keys": (
        "← → previous, next word · ↑ ↓ head · Page Up / Page Down layer · Tab to a strip, then "
        "← → along its cells · Hover or focus a cell for its calculation",
        "← → 上一個、下一個詞 · ↑ ↓ 注意力頭 · Page Up／Page Down 層 · "
        "按 Tab 進入色帶後，← → 在格子間移動 · 滑鼠移到格子上或聚焦，即顯示計算過程",
        "← → 前・次の単語 · ↑ ↓ ヘッド · Page Up／Page Down 層 · "
        "Tab で帯に入ると ← → でセル間を移動 · セルにカーソルかフォーカスを合わせると計算を表示",
    ),
    "tokens": ("Tokens (keys)", "詞元（鍵）", "トークン（キー）"),
    "words": ("Words", "詞", "単語"),
    "scale": ("colours: {low} to {high}", "色階：{low} 到 {high}", "色の範囲：{low} ～ {high}"),
    "raw": (
        "its row of QKᵀ: the query with each key",
        "QKᵀ 中的一列：查詢與每個鍵的內積",
        "QKᵀ の 1 行：クエリと各キーの内積",
    ),
    "score": ("scaled: × {scaling}", "縮放：× {scaling}", "スケーリング：× {scaling}"),
    "masked": (
        "mask: what may not be seen gets −∞",
        "遮罩：不可看見的位置為 −∞",
        "マスク：見てはいけない位置は −∞",
    ),
    "weight": (
        "weights a, summing to {sum}",
        "注意力權重 a，總和為 {sum}",
        "注意の重み a、合計 {sum}",
    ),
    "brought": (
        "weight a × length of the value v",
        "權重 a × 值向量 v 的長度",
        "重み a × バリュー v の長さ",
    ),
    "share": (
        "each token's share of o, summing to {sum}",
        "各詞元對 o 的占比，總和為 {sum}",
        "各トークンが o に占める割合、合計 {sum}",
    ),
    "o": (
        "weighted sum of the values: {size} numbers",
        "值向量的加權和：共 {size} 個數",
        "バリューの重み付き和：{size} 個の数",
    ),
    "o_model": (
        "the model's own head output",
        "模型自己算出的注意力頭輸出",
        "モデル自身のヘッド出力",
    ),
    "difference": (
        "Largest difference between o and the model's own head output: {difference}",
        "o 與模型自身輸出的最大差異：{difference}",
        "o とモデル自身のヘッド出力の最大の差：{difference}",
    ),
    "cell": ("{term}, {key}: {value}", "{term}，{key}：{value}", "{term}、{key}：{value}"),
    "pair": (
        "From “{query}” (query) to “{key}” (key, token {at})",
        "從「{query}」（查詢）到「{key}」（鍵，第 {at} 個詞元）",
        "「{query}」（クエリ）から「{key}」（キー、トークン {at}）へ",
    ),
    "component": (
        "Component {at} of the head's output",
        "注意力頭輸出的第 {at} 個分量",
        "ヘッド出力の第 {at} 成分",
    ),
    "raw_how": (
        "length of the query × length of the key × cosine of the angle between them",
        "查詢向量的長度 × 鍵向量的長度 × 兩者夾角的餘弦",
        "クエリの長さ × キーの長さ × 両者のなす角の余弦",
    ),
    "score_how": ("times the scaling", "乘以縮放係數", "スケーリング係数を掛ける"),
    "seen_how": (
        "this token may be seen: M adds 0",
        "可以看見這個詞元：M 加 0",
        "このトークンは見てよい：M は 0 を足す",
    ),
    "hidden_how": (
        "this token may not be seen: M adds −∞",
        "不可看見這個詞元：M 加 −∞",
        "このトークンは見てはいけない：M は −∞ を足す",
    ),
    "weight_how": (
        "e to the power of the score less the row's largest, over the sum of all such",
        "e 的（分數減去該列最大值）次方，除以全列的總和",
        "e の（スコア − 行の最大値）乗を、行全体の合計で割る",
    ),
    "brought_how": (
        "weight × length of the value",
        "權重 × 值向量的長度",
        "重み × バリューの長さ",
    ),
    "share_how": (
        "how far a·v goes along o, as a part of o",
        "a·v 在 o 方向上的分量占 o 的比例",
        "a·v の o 方向の成分が o に占める割合",
    ),
    "o_how": (
        "the weighted sum of this component of the values, largest terms first",
        "各值向量此分量的加權和，由絕對值最大的項開始",
        "各バリューのこの成分の重み付き和、絶対値の大きい項から",
    ),
    "o_model_how": (
        "the model's own, and the difference",
        "模型自己的數值，以及兩者之差",
        "モデル自身の値と、その差",
    ),
    "others": ("{count} more: {value}", "其餘 {count} 項：{value}", "ほか {count} 項：{value}"),
    "part": (
        "Tokens {first} to {last} of {count} are drawn",
        "繪出第 {first} 到 {last} 個詞元，共 {count} 個",
        "全 {count} トークンのうち {first} から {last} を表示",
    ),
}


def messages_in(lang: str) -> tuple[str, dict[str, str]]:
    """A language as HTML names it, and what a page says in it.

    Raises:
        InputError: no such language.
    """
    tags = {name: name for name in LANGUAGES} | _OTHER_NAMES
    tag = {name.lower(): tag for name, tag in tags.items()}.get(str(lang).lower())
    if tag is None:
        known = ", ".join(map(repr, tags))
        raise InputError(f"lang must be one of {known}, got {lang!r}")
    column = LANGUAGES.index(tag)
    return tag, {name: row[column] for name, row in MESSAGES.items()}
