[
    ("jpeg: the next bit of a coefficient is added with the wrong sign", "test test_jpeg",
     [("src/train/data/picture_jpeg.c", "(*value > 0 ? 1 << j->low : -(1 << j->low))", "(1 << j->low)")]),
    ("jpeg: the mean goes on behind a restart", "test test_jpeg",
     [("src/train/data/picture_jpeg.c", "    j->at += 2;\n    for (int i = 0; i < j->parts; i++)\n        j->part[i]->before = 0;",
       "    j->at += 2;")]),
    ("jpeg: small channels are stretched by whole samples", "test test_jpeg",
     [("src/train/data/picture_jpeg.c", "*behind = (int)(parts - whole * 2 * most);", "*behind = 0;")]),
    ("jpeg: a picture's size is believed", "test test_jpeg",
     [("src/train/data/picture_jpeg.c", "if ((uint64_t)blocks > 8 * (uint64_t)j->count)", "if ((uint64_t)blocks > (1ull << 40))")]),
]
