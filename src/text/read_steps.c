/* SPDX-License-Identifier: MIT */
/*
 * The normalizer, pre_tokenizer, decoder and post_processor of a tokenizer.json. Each is one step, or a Sequence of
 * them, which is read as if its steps stood there one behind another.
 */
#include "text/byte_level.h"
#include "text/read_members.h"

typedef bool step_reader(tokenizer *t, const json_value *value, char *error);

static bool read_sequence(tokenizer *t, const member_reader *r, const char *list, step_reader *read) {
    const char *const names[] = {"type", list, NULL};
    const json_value *steps;
    if (!members_only(r, names) || !member_list(r, list, &steps)) return false;
    for (const json_value *v = steps->first; v; v = v->next)
        if (!read(t, v, r->error)) return false;
    return true;
}

static bool has_room(const member_reader *r, int count) {
    return count < TOKENIZER_MAX_STEPS ||
           file_fail(r->error, "%s has more than %d steps", r->where, TOKENIZER_MAX_STEPS);
}

/* ---- Normalizers ------------------------------------------------------------------------------------- */

bool read_normalizer(tokenizer *t, const json_value *value, char *error) {
    const member_reader r = {value, "its normalizer", error};
    const char *type;
    if (!member_type(&r, &type)) return false;
    if (strcmp(type, "Sequence") == 0) return read_sequence(t, &r, "normalizers", read_normalizer);
    if (!has_room(&r, t->normalizer_count)) return false;
    normalizer *n = &t->normalizers[t->normalizer_count++];
    if (strcmp(type, "NFC") == 0) {
        n->kind = NORMALIZER_NFC;
        return members_only(&r, (const char *const[]){"type", NULL});
    }
    if (strcmp(type, "Prepend") == 0) {
        n->kind = NORMALIZER_PREPEND;
        return members_only(&r, (const char *const[]){"type", "prepend", NULL}) &&
               member_text(&r, "prepend", &n->content);
    }
    if (strcmp(type, "Replace") == 0) {
        n->kind = NORMALIZER_REPLACE;
        return members_only(&r, (const char *const[]){"type", "pattern", "content", NULL}) &&
               member_search(&r, "pattern", &n->what) && member_text(&r, "content", &n->content);
    }
    return unknown_type(&r, type, "NFC, Prepend, Replace and Sequence");
}

/* ---- Splitters --------------------------------------------------------------------------------------- */

static bool set_expression(const member_reader *r, splitter *s, const char *expression) {
    char reason[FILE_ERROR];
    s->what.expression = pattern_compile(expression, reason);
    return s->what.expression || file_fail(r->error, "%s: %.400s", r->where, reason);
}

static bool read_behavior(const member_reader *r, split_behavior *behavior) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    const char *text;
    if (!member_text(r, "behavior", &text)) return false;
    for (int i = 0; i < 5; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *behavior = (split_behavior)i;
        return true;
    }
    return file_fail(r->error, "\"behavior\" of %s is \"%.64s\", which is unknown", r->where, text);
}

static bool read_split(const member_reader *r, splitter *s) {
    s->kind = SPLITTER_SEARCH;
    return members_only(r, (const char *const[]){"type", "pattern", "behavior", "invert", NULL}) &&
           member_search(r, "pattern", &s->what) && read_behavior(r, &s->behavior) &&
           member_boolean(r, "invert", false, &s->invert);
}

static bool read_digits(const member_reader *r, splitter *s) {
    bool each;
    if (!members_only(r, (const char *const[]){"type", "individual_digits", NULL}) ||
        !member_boolean(r, "individual_digits", false, &each))
        return false;
    s->kind = SPLITTER_SEARCH;
    s->behavior = each ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS;
    return set_expression(r, s, "\\p{N}");
}

static bool read_byte_level(tokenizer *t, const member_reader *r, splitter *s) {
    bool space, expression;
    if (!members_only(r, (const char *const[]){"type", "add_prefix_space", "trim_offsets", "use_regex", NULL}) ||
        !member_boolean(r, "add_prefix_space", true, &space) || !member_boolean(r, "use_regex", true, &expression))
        return false;
    s->kind = SPLITTER_BYTES;
    s->behavior = SPLIT_ISOLATED;
    s->prepend = space ? PREPEND_ALWAYS : PREPEND_NEVER;
    t->model.byte_level = true;
    return !expression || set_expression(r, s, BYTE_LEVEL_PATTERN);
}

/* "prepend_scheme", for which older files have "add_prefix_space". */
static bool read_prepend(const member_reader *r, int *prepend) {
    static const char *const names[] = {"never", "first", "always"};
    bool space;
    const char *text = NULL;
    if (!member_boolean(r, "add_prefix_space", true, &space)) return false;
    if (json_has(r->object, "prepend_scheme") && !member_text(r, "prepend_scheme", &text)) return false;
    if (!text) text = space ? "always" : "never";
    if (!space && strcmp(text, "never") != 0)
        return file_fail(r->error, "%s has \"add_prefix_space\" false and \"prepend_scheme\" \"%.32s\"", r->where,
                         text);
    for (*prepend = 0; *prepend < 3; ++*prepend)
        if (strcmp(text, names[*prepend]) == 0) return true;
    return file_fail(r->error, "\"prepend_scheme\" of %s is \"%.64s\", which is unknown", r->where, text);
}

/* What the pre-tokenizer and the decoder Metaspace have. */
static bool read_metaspace(const member_reader *r, const char **replacement, int *prepend, bool *split) {
    if (!members_only(r, (const char *const[]){"type", "replacement", "prepend_scheme", "add_prefix_space", "split",
                                               "str_rep", NULL}) ||
        !member_text(r, "replacement", replacement) || !read_prepend(r, prepend) ||
        !member_boolean(r, "split", true, split))
        return false;
    size_t length = strlen(*replacement);
    return (length && json_character(*replacement, length) == length) ||
           file_fail(r->error, "\"replacement\" of %s is not one character", r->where);
}

bool read_splitter(tokenizer *t, const json_value *value, char *error) {
    const member_reader r = {value, "its pre_tokenizer", error};
    const char *type;
    if (!member_type(&r, &type)) return false;
    if (strcmp(type, "Sequence") == 0) return read_sequence(t, &r, "pretokenizers", read_splitter);
    if (t->model.byte_level)
        return file_fail(error, "its pre_tokenizer has %.64s behind ByteLevel, which must be the last", type);
    if (!has_room(&r, t->splitter_count)) return false;
    splitter *s = &t->splitters[t->splitter_count++];
    if (strcmp(type, "Split") == 0) return read_split(&r, s);
    if (strcmp(type, "Digits") == 0) return read_digits(&r, s);
    if (strcmp(type, "ByteLevel") == 0) return read_byte_level(t, &r, s);
    if (strcmp(type, "Metaspace") == 0) {
        int prepend = 0;
        bool split;
        s->kind = SPLITTER_METASPACE;
        s->behavior = SPLIT_MERGED_WITH_NEXT;
        if (!read_metaspace(&r, &s->replacement, &prepend, &split)) return false;
        s->prepend = prepend == 0 ? PREPEND_NEVER : prepend == 1 ? PREPEND_FIRST : PREPEND_ALWAYS;
        if (split) s->what = (search){.text = s->replacement, .length = strlen(s->replacement)};
        return true;
    }
    return unknown_type(&r, type, "ByteLevel, Digits, Metaspace, Split and Sequence");
}

/* ---- Decoders ---------------------------------------------------------------------------------------- */

static bool read_strip(const member_reader *r, decoder *d) {
    d->kind = DECODER_STRIP;
    if (!members_only(r, (const char *const[]){"type", "content", "start", "stop", NULL}) ||
        !member_text(r, "content", &d->what.text) || !member_integer(r, "start", 0, INT32_MAX, &d->start) ||
        !member_integer(r, "stop", 0, INT32_MAX, &d->stop))
        return false;
    d->what.length = strlen(d->what.text);
    return d->what.length || file_fail(r->error, "\"content\" of %s is an empty text", r->where);
}

bool read_decoder(tokenizer *t, const json_value *value, char *error) {
    const member_reader r = {value, "its decoder", error};
    const char *type;
    if (!member_type(&r, &type)) return false;
    t->decodes = true;
    if (strcmp(type, "Sequence") == 0) return read_sequence(t, &r, "decoders", read_decoder);
    if (!has_room(&r, t->decoder_count)) return false;
    decoder *d = &t->decoders[t->decoder_count++];
    if (strcmp(type, "ByteLevel") == 0) {
        d->kind = DECODER_BYTES;
        return members_only(&r, (const char *const[]){"type", "add_prefix_space", "trim_offsets", "use_regex", NULL});
    }
    if (strcmp(type, "Replace") == 0) {
        d->kind = DECODER_REPLACE;
        return members_only(&r, (const char *const[]){"type", "pattern", "content", NULL}) &&
               member_search(&r, "pattern", &d->what) && member_text(&r, "content", &d->content);
    }
    if (strcmp(type, "ByteFallback") == 0 || strcmp(type, "Fuse") == 0) {
        d->kind = type[0] == 'F' ? DECODER_FUSE : DECODER_FALLBACK;
        return members_only(&r, (const char *const[]){"type", NULL});
    }
    if (strcmp(type, "Strip") == 0) return read_strip(&r, d);
    if (strcmp(type, "Metaspace") == 0) {
        int prepend = 0;
        bool split;
        d->kind = DECODER_METASPACE;
        if (!read_metaspace(&r, &d->what.text, &prepend, &split)) return false;
        d->what.length = strlen(d->what.text);
        d->prepended = prepend != 0;
        return true;
    }
    return unknown_type(&r, type, "ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Strip and Sequence");
}

/* ---- Tokens around a text ------------------------------------------------------------------------------ */

/* The numbers of a special token of a template. */
static bool add_template_token(const member_reader *r, const json_value *special, const char *name, token_list *to) {
    const json_value *token = json_member(special, name), *ids = json_member(token, "ids");
    if (!ids || ids->type != JSON_ARRAY)
        return file_fail(r->error, "%s has no \"ids\" of the special token \"%.64s\"", r->where, name);
    for (const json_value *v = ids->first; v; v = v->next) {
        if (v->type != JSON_NUMBER || !v->exact || v->integer < 0 || v->integer > VOCABULARY_MAX)
            return file_fail(r->error, "%s gives \"%.64s\" a number that is no token's", r->where, name);
        int32_t id = (int32_t)v->integer;
        if (!token_list_add(to, &id, 1)) return no_memory(r->error);
    }
    return true;
}

/* The template of a single text: special tokens, the text, special tokens. Outer templates are put around inner ones.
 */
static bool read_template(tokenizer *t, const member_reader *r) {
    const json_value *single;
    token_list before = {0}, behind = {0};
    int texts = 0;
    if (!members_only(r, (const char *const[]){"type", "single", "pair", "special_tokens", NULL}) ||
        !member_list(r, "single", &single))
        return false;
    bool ok = true;
    for (const json_value *v = single->first; v && ok; v = v->next) {
        const json_value *token = json_member(json_member(v, "SpecialToken"), "id");
        const json_value *text = json_member(json_member(v, "Sequence"), "id");
        if (token && token->type == JSON_STRING)
            ok =
                add_template_token(r, json_member(r->object, "special_tokens"), token->text, texts ? &behind : &before);
        else if (text && text->type == JSON_STRING && strcmp(text->text, "A") == 0)
            texts++;
        else
            ok = file_fail(r->error, "\"single\" of %s has an element that is neither a special token nor text A",
                           r->where);
    }
    if (ok && texts != 1) ok = file_fail(r->error, "\"single\" of %s has the text %d times, not once", r->where, texts);
    ok = ok && ((token_list_add(&before, t->before.ids, t->before.count) &&
                 token_list_add(&t->behind, behind.ids, behind.count)) ||
                no_memory(r->error));
    token_list_free(&behind);
    token_list_free(ok ? &t->before : &before);
    if (ok) t->before = before;
    return ok;
}

bool read_around(tokenizer *t, const json_value *value, char *error) {
    const member_reader r = {value, "its post_processor", error};
    const char *type;
    if (!member_type(&r, &type)) return false;
    if (strcmp(type, "Sequence") == 0) return read_sequence(t, &r, "processors", read_around);
    if (strcmp(type, "TemplateProcessing") == 0) return read_template(t, &r);
    if (strcmp(type, "ByteLevel") == 0) /* changes offsets in the text, which are not computed here, and no token */
        return members_only(&r, (const char *const[]){"type", "add_prefix_space", "trim_offsets", "use_regex", NULL});
    return unknown_type(&r, type, "ByteLevel, TemplateProcessing and Sequence");
}
