"""What tests of pictures and pages show."""

IDS = [5, 17, 23, 8, 4, 42, 99, 3, 77, 61, 12]

# Text that runs something, or shows as something else, where a page takes it for more than text.
HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror=window.ran=1>",
    "<svg/onload=window.ran=1>",
    '"onmouseover="window.ran=1',
    "'-alert(1)-'",
    "&lt;b&gt;",
    "${window.ran=1}",
    "\\u003cb\\",
    "PYTHON_PARAMS",
    "a\u2028b",
    "x\u202egpj.exe",
    "\uffff",
]
