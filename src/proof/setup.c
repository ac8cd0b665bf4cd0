/* SPDX-License-Identifier: MIT */
/* Reads a row of the table of cases. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proof/cases.h"

static const char *const data_names[] = {
    /* clang-format off */
    [PROOF_NORMAL] = "normal",
    [PROOF_OFFSET] = "offset",
    [PROOF_EQUAL] = "equal",
    [PROOF_EQUAL_DY] = "equal_dy",
    [PROOF_ONES] = "ones",
    [PROOF_TINY] = "tiny",
    [PROOF_HUGE] = "huge",
    [PROOF_MIXED] = "mixed",
    [PROOF_TIES] = "ties",
    [PROOF_NAN] = "nan",
    [PROOF_INF] = "inf",
    [PROOF_MINUS_INF] = "minus_inf",
    [PROOF_WIDE] = "wide",
    [PROOF_WIDE_NAN] = "wide_nan",
    [PROOF_REPEAT] = "repeat",
    [PROOF_FIRST] = "first",
    [PROOF_NAN_SCALE] = "nan_scale",
    [PROOF_INF_SCALE] = "inf_scale",
    [PROOF_ZERO] = "zero",
    [PROOF_RUNS] = "runs",
    [PROOF_SKEWED] = "skewed",
    [PROOF_DISTINCT] = "distinct",
    [PROOF_IGNORED] = "ignored",
    [PROOF_ALL_IGNORED] = "all_ignored",
    /* clang-format on */
};

enum { DATA_COUNT = sizeof data_names / sizeof data_names[0], WORD = 96 };

static const vjp_slot *find_slot(const vjp_op_info *info, const char *name) {
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++)
        for (size_t i = 0; i < info->pass[pass].count; i++)
            if (strcmp(info->pass[pass].slots[i].name, name) == 0) return &info->pass[pass].slots[i];
    return NULL;
}

/* `name` is kept: the table's own, or a constant. */
static proof_choice *choice_named(proof_setup *setup, const char *name) {
    for (int i = 0; i < setup->choices; i++)
        if (strcmp(setup->choice[i].name, name) == 0) return &setup->choice[i];
    if (setup->choices == PROOF_MAX_CHOICES) return NULL;
    proof_choice *choice = &setup->choice[setup->choices++];
    *choice = (proof_choice){.name = name, .dtype = -1};
    return choice;
}

static bool set_data(proof_setup *setup, const char *value) {
    for (int i = 0; i < DATA_COUNT; i++)
        if (strcmp(data_names[i], value) == 0) {
            setup->data = (proof_data)i;
            return true;
        }
    return false;
}

static bool set_only(proof_setup *setup, char *value) {
    setup->only = 0;
    char *rest = NULL;
    for (char *name = strtok_r(value, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        int dtype = vjp_dtype_find(name);
        if (dtype < 0) return false;
        setup->only |= 1u << dtype;
    }
    return setup->only != 0;
}

/* SLOT, or SLOT/N at the top and SLOT*N at the bottom. */
static bool set_extreme(proof_setup *setup, proof_end end, char *value) {
    char *mark = strpbrk(value, "/*");
    double share = 1;
    if (mark) {
        if (*mark != (end == PROOF_TOP ? '/' : '*') || !((share = atof(mark + 1)) > 0)) return false;
        *mark = 0;
    }
    const vjp_slot *slot = find_slot(vjp_op_describe(setup->op), value);
    bool number = slot && slot->kind != VJP_KIND_INDEX && slot->kind != VJP_KIND_ARGMAX;
    if (!number || (slot->flags & VJP_SLOT_OUTPUT) || setup->extremes == PROOF_MAX_EXTREMES) return false;
    setup->extreme[setup->extremes++] = (proof_extreme){slot->name, end, share};
    return true;
}

/* One word of the row. */
static bool read_word(proof_setup *setup, char *word, char error[TEXT_ERROR]) {
    const vjp_op_info *info = vjp_op_describe(setup->op);
    char whole[WORD];
    snprintf(whole, sizeof whole, "%s", word);
    snprintf(error, TEXT_ERROR, "case \"%s %s\": cannot read \"%s\"", info->name, setup->text, whole);
    if (word[0] == '-') {
        const vjp_slot *slot = find_slot(info, word + 1);
        proof_choice *choice =
            slot && (slot->flags & (VJP_SLOT_OPTIONAL | VJP_SLOT_OUTPUT)) ? choice_named(setup, slot->name) : NULL;
        if (choice) choice->absent = true;
        return choice;
    }
    char *value = strchr(word, '=');
    if (!value) return false;
    *value++ = 0;
    if (strcmp(word, "data") == 0) return set_data(setup, value);
    if (strcmp(word, "top") == 0) return set_extreme(setup, PROOF_TOP, value);
    if (strcmp(word, "bottom") == 0) return set_extreme(setup, PROOF_BOTTOM, value);
    if (strcmp(word, "only") == 0) return set_only(setup, value);
    if (strcmp(word, "bound") == 0) return (setup->bound = atof(value)) > 0;
    const vjp_slot *slot = find_slot(info, word);
    bool parameters = strcmp(word, "param") == 0;
    if (!slot && !parameters) return text_set_attribute(setup->op, &setup->attributes, whole, error);
    proof_choice *choice = choice_named(setup, slot ? slot->name : "param");
    if (!choice) return false;
    if (value[0] != '[') return (choice->dtype = vjp_dtype_find(value)) >= 0;
    choice->shaped = true;
    return text_parse_shape(value, &choice->ndim, choice->shape, error);
}

bool proof_setup_read(proof_setup *setup, const vjp_op *op, const char *text, char error[TEXT_ERROR]) {
    *setup = (proof_setup){.op = op, .text = text, .only = ~0u};
    vjp_op_defaults(op, &setup->attributes);
    while (*text) {
        size_t length = strcspn(text, " ");
        char word[WORD];
        if (length >= sizeof word) length = sizeof word - 1;
        memcpy(word, text, length);
        word[length] = 0;
        if (length && !read_word(setup, word, error)) return false;
        text += length + (text[length] == ' ');
    }
    error[0] = 0;
    return true;
}

const proof_choice *proof_choice_of(const proof_setup *setup, const vjp_slot *slot) {
    const proof_choice *all = NULL;
    for (int i = 0; i < setup->choices; i++) {
        if (strcmp(setup->choice[i].name, slot->name) == 0) return &setup->choice[i];
        if ((slot->kind == VJP_KIND_PARAMETER || slot->kind == VJP_KIND_GRADIENT) &&
            strcmp(setup->choice[i].name, "param") == 0)
            all = &setup->choice[i];
    }
    return all;
}

const proof_extreme *proof_extreme_of(const proof_setup *setup, const vjp_slot *slot) {
    for (int i = 0; i < setup->extremes; i++)
        if (strcmp(setup->extreme[i].slot, slot->name) == 0) return &setup->extreme[i];
    return NULL;
}

bool proof_is_adversarial(const proof_setup *setup) {
    if (setup->extremes) return true;
    switch (setup->data) {
    case PROOF_OFFSET:
    case PROOF_EQUAL:
    case PROOF_EQUAL_DY:
    case PROOF_TINY:
    case PROOF_HUGE:
    case PROOF_MIXED:
    case PROOF_WIDE:
    case PROOF_WIDE_NAN: return true;
    default: return false;
    }
}
