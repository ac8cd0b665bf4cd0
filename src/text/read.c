/* SPDX-License-Identifier: MIT */
/*
 * Reading a tokenizer.json. The file is not trusted: every member is checked, what is unknown is refused by name, and a
 * file that is accepted can be used with any text. The strings of the tree are kept; the tokens point into them.
 */
#include <errno.h>
#include <stdio.h>

#include "core/system.h"
#include "text/byte_level.h"
#include "text/read_members.h"

/* ---- The model --------------------------------------------------------------------------------------- */

/* The size of the vocabulary: the largest number of a token, or of an added token, + 1. */
static bool largest_number(const json_value *list, bool added, int64_t *size, char *error) {
    for (const json_value *v = list->first; v; v = v->next) {
        const json_value *id = added ? json_member(v, "id") : v;
        if (!id || id->type != JSON_NUMBER || !id->exact || id->integer < 0 || id->integer >= VOCABULARY_MAX)
            return file_fail(error, "a token has no number between 0 and %d", VOCABULARY_MAX - 1);
        *size = vjp_max(*size, id->integer + 1);
    }
    return true;
}

static bool read_vocabulary(tokenizer *t, const json_value *vocab, const json_value *added, char *error) {
    int64_t size = 0;
    if (!largest_number(vocab, false, &size, error) || (added && !largest_number(added, true, &size, error)))
        return false;
    if (!vocabulary_create(&t->names, (int32_t)size) || !vocabulary_create(&t->model.vocabulary, (int32_t)size) ||
        !(t->special = calloc((size_t)size + 1, sizeof *t->special)))
        return file_fail(error, "there is no memory for %lld tokens", (long long)size);
    for (const json_value *v = vocab->first; v; v = v->next) {
        int32_t id = (int32_t)v->integer;
        if (t->names.tokens[id].text)
            return file_fail(error, "its tokens \"%.64s\" and \"%.64s\" have the same number, %d",
                             t->names.tokens[id].text, v->key, (int)id);
        (void)vocabulary_set(&t->names, id, v->key, strlen(v->key)); /* JSON's keys differ */
    }
    return true;
}

/* The vocabulary that words are looked up in: of a byte-level model in bytes. Others of its tokens cannot occur. */
static bool set_model_vocabulary(tokenizer *t, char *error) {
    size_t bytes = 0, at = 0, count;
    for (int32_t i = 0; i < t->names.size; i++)
        bytes += t->names.tokens[i].length;
    if (t->model.byte_level && !(t->byte_texts = malloc(bytes + 1)))
        return file_fail(error, "there is no memory for the tokens");
    for (int32_t i = 0; i < t->names.size; i++) {
        const token_text *one = &t->names.tokens[i];
        if (!one->text) continue;
        const char *text = one->text;
        count = one->length;
        if (t->model.byte_level) {
            if (!byte_level_bytes(text, one->length, t->byte_texts + at, &count)) continue;
            text = t->byte_texts + at;
            at += count;
        }
        (void)vocabulary_set(&t->model.vocabulary, i, text, count);
    }
    return true;
}

/* The two tokens of a merge: ["a", "b"], or "a b" in older files. `second` is not ended: it has `length` bytes. */
static bool merge_texts(const json_value *value, const char *side[2], size_t length[2]) {
    if (value->type == JSON_STRING) {
        const char *space = strchr(value->text, ' ');
        if (!space || strchr(space + 1, ' ')) return false;
        side[0] = value->text;
        length[0] = (size_t)(space - value->text);
        side[1] = space + 1;
        length[1] = strlen(space + 1);
        return true;
    }
    if (value->type != JSON_ARRAY || value->count != 2) return false;
    const json_value *v = value->first;
    for (int i = 0; i < 2; i++, v = v->next) {
        if (v->type != JSON_STRING) return false;
        side[i] = v->text;
        length[i] = strlen(v->text);
    }
    return true;
}

static bool read_merges(tokenizer *t, const json_value *merges, char *error) {
    if (!bpe_reserve_merges(&t->model, merges->count)) return file_fail(error, "there is no memory for its merges");
    byte_list both = {0};
    uint32_t rank = 0;
    bool ok = true;
    for (const json_value *v = merges->first; v && ok; v = v->next, rank++) {
        const char *side[2] = {NULL, NULL};
        size_t length[2] = {0, 0};
        ok = merge_texts(v, side, length) || file_fail(error, "its merge %u is not two tokens", (unsigned)rank);
        if (!ok) break;
        both.count = 0;
        ok = (byte_list_add(&both, side[0], length[0]) && byte_list_add(&both, side[1], length[1])) || no_memory(error);
        if (!ok) break;
        int32_t left = vocabulary_find(&t->names, side[0], length[0]);
        int32_t right = vocabulary_find(&t->names, side[1], length[1]);
        int32_t product = vocabulary_find(&t->names, both.bytes, both.count);
        if (left < 0 || right < 0 || product < 0)
            ok = file_fail(error, "its merge %u, \"%.*s\" and \"%.*s\", needs a token that is not in its vocabulary",
                           (unsigned)rank, (int)vjp_min((int64_t)length[0], 64), side[0],
                           (int)vjp_min((int64_t)length[1], 64), side[1]);
        else
            bpe_set_merge(&t->model, left, right, rank, product);
    }
    byte_list_free(&both);
    return ok;
}

/* Members that must be missing, null, zero or empty: vjp does not do what they ask for. */
static bool require_unset(const member_reader *r, const char *name) {
    char shown[JSON_SHOWN];
    const json_value *v = json_member(r->object, name);
    bool unset = !v || v->type == JSON_NULL || (v->type == JSON_NUMBER && v->number == 0) ||
                 (v->type == JSON_STRING && !v->text[0]);
    return unset ||
           file_fail(r->error, "\"%s\" of %s is %s, which is not supported", name, r->where, json_show(v, shown));
}

static bool read_model(tokenizer *t, const json_value *value, const json_value *added, char *error) {
    static const char *const names[] = {"type",
                                        "dropout",
                                        "unk_token",
                                        "continuing_subword_prefix",
                                        "end_of_word_suffix",
                                        "fuse_unk",
                                        "byte_fallback",
                                        "ignore_merges",
                                        "vocab",
                                        "merges",
                                        NULL};
    const member_reader r = {value, "its model", error};
    const char *type = "BPE", *unknown = NULL;
    const json_value *vocab = json_member(value, "vocab"), *merges;
    if (!value || value->type != JSON_OBJECT) return file_fail(error, "it has no model");
    if (json_has(value, "type") && !member_text(&r, "type", &type)) return false;
    if (strcmp(type, "BPE") != 0) return unknown_type(&r, type, "BPE");
    if (!members_only(&r, names) || !require_unset(&r, "dropout") || !require_unset(&r, "continuing_subword_prefix") ||
        !require_unset(&r, "end_of_word_suffix") || !member_boolean(&r, "fuse_unk", false, &t->model.fuse_unknown) ||
        !member_boolean(&r, "byte_fallback", false, &t->model.byte_fallback) ||
        !member_boolean(&r, "ignore_merges", false, &t->model.whole_words) || !member_list(&r, "merges", &merges))
        return false;
    if (!vocab || vocab->type != JSON_OBJECT) return file_fail(error, "its model has no \"vocab\"");
    if (json_has(value, "unk_token") && !member_text(&r, "unk_token", &unknown)) return false;
    if (!read_vocabulary(t, vocab, added, error) || !set_model_vocabulary(t, error) || !read_merges(t, merges, error))
        return false;
    t->model.unknown = unknown ? vocabulary_find(&t->names, unknown, strlen(unknown)) : -1;
    if (unknown && t->model.unknown < 0)
        return file_fail(error, "its unknown token \"%.64s\" is not in its vocabulary", unknown);
    bpe_finish(&t->model);
    return true;
}

/* ---- Added tokens ------------------------------------------------------------------------------------ */

static bool read_added_token(tokenizer *t, const json_value *value, added_token *a, char *error) {
    static const char *const names[] = {"id",     "content",    "single_word", "lstrip",
                                        "rstrip", "normalized", "special",     NULL};
    const member_reader r = {value, "an added token", error};
    int64_t id;
    if (!members_only(&r, names) || !member_text(&r, "content", &a->text) ||
        !member_integer(&r, "id", 0, t->names.size - 1, &id) ||
        !member_boolean(&r, "single_word", false, &a->single_word) ||
        !member_boolean(&r, "lstrip", false, &a->left_strip) || !member_boolean(&r, "rstrip", false, &a->right_strip) ||
        !member_boolean(&r, "normalized", true, &a->normalized) || !member_boolean(&r, "special", false, &a->special))
        return false;
    a->id = (int32_t)id;
    if (!a->text[0]) return file_fail(error, "its added token %lld is an empty text", (long long)id);
    int32_t known = tokenizer_find(t, a->text);
    const char *other = tokenizer_token(t, a->id);
    if (known >= 0 && known != a->id)
        return file_fail(error, "its added token \"%.64s\" has the number %d, and in the vocabulary %d", a->text,
                         (int)a->id, (int)known);
    if (known < 0 && other)
        return file_fail(error, "its added token \"%.64s\" has the number %d, which \"%.64s\" has", a->text, (int)a->id,
                         other);
    if (known < 0) (void)vocabulary_set(&t->names, a->id, a->text, strlen(a->text));
    if (a->special) t->special[a->id] = true;
    if (a->single_word && !t->word && !(t->word = pattern_compile("[\\w\\x{200c}\\x{200d}]", error))) return false;
    return true;
}

static bool read_added(tokenizer *t, const json_value *list, char *error) {
    if (!list || list->type == JSON_NULL) return true;
    if (list->type != JSON_ARRAY) return file_fail(error, "its added_tokens are not a list");
    t->added = calloc(list->count + 1, sizeof *t->added);
    if (!t->added) return file_fail(error, "there is no memory for its added tokens");
    for (const json_value *v = list->first; v; v = v->next) {
        added_token *a = &t->added[t->added_count];
        if (!read_added_token(t, v, a, error)) return false;
        const char *text = a->text;
        size_t length = strlen(text);
        if (a->normalized && !normalize(t, &text, &length, error)) return false;
        if (!added_tree_add(a->normalized ? &t->normalized : &t->raw, text, length, (int32_t)t->added_count++))
            return file_fail(error, "there is no memory for its added tokens");
    }
    return true;
}

/* ---- The whole --------------------------------------------------------------------------------------- */

static bool require_null(const json_value *root, const char *name, char *error) {
    return !json_has(root, name) || file_fail(error, "it has %s, which is not supported", name);
}

/* The tokens around a text must be some. */
static bool check_around(const tokenizer *t, const token_list *list, char *error) {
    for (size_t i = 0; i < list->count; i++)
        if (!tokenizer_token(t, list->ids[i]))
            return file_fail(error, "its post_processor adds the token %d, which it does not have", (int)list->ids[i]);
    return true;
}

static bool read_root(tokenizer *t, const json_value *root, char *error) {
    static const char *const names[] = {"version",       "truncation",     "padding", "added_tokens", "normalizer",
                                        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    const member_reader r = {root, "it", error};
    if (!members_only(&r, names) || !require_null(root, "truncation", error) || !require_null(root, "padding", error))
        return false;
    const json_value *added = json_member(root, "added_tokens");
    if (added && added->type != JSON_ARRAY) added = NULL; /* refused by read_added() unless it is null */
    if ((json_has(root, "normalizer") && !read_normalizer(t, json_member(root, "normalizer"), error)) ||
        (json_has(root, "pre_tokenizer") && !read_splitter(t, json_member(root, "pre_tokenizer"), error)) ||
        (json_has(root, "decoder") && !read_decoder(t, json_member(root, "decoder"), error)) ||
        (json_has(root, "post_processor") && !read_around(t, json_member(root, "post_processor"), error)))
        return false;
    if (!read_model(t, json_member(root, "model"), added, error) ||
        !read_added(t, json_member(root, "added_tokens"), error) || !check_around(t, &t->before, error) ||
        !check_around(t, &t->behind, error))
        return false;
    split_find_boundary(t);
    return true;
}

/* Takes the document. */
static tokenizer *read_document(json_document *document, char *error) {
    tokenizer *t = calloc(1, sizeof *t);
    bool ok = t != NULL || file_fail(error, "there is no memory for a tokenizer");
    ok = ok && read_root(t, document->root, error);
    if (ok) t->texts = json_take_texts(document);
    json_free(document);
    if (ok) return t;
    tokenizer_free(t);
    return NULL;
}

tokenizer *tokenizer_parse(const char *json, size_t length, char error[FILE_ERROR]) {
    json_document document;
    return json_parse_up_to(TOKENIZER_MAX_BYTES, json, length, &document, error) ? read_document(&document, error)
                                                                                 : NULL;
}

tokenizer *tokenizer_read(const char *path, char error[FILE_ERROR]) {
    char inside[4096], reason[FILE_ERROR];
    system_status status;
    if (system_status_of(path, &status) && status.kind == SYSTEM_FOLDER) {
        if (snprintf(inside, sizeof inside, "%s/tokenizer.json", path) >= (int)sizeof inside) {
            file_fail(error, "%.300s: the path is too long", path);
            return NULL;
        }
        path = inside;
    }
    json_document document;
    if (!json_read_up_to(TOKENIZER_MAX_BYTES, path, &document, error)) return NULL;
    tokenizer *t = read_document(&document, reason);
    if (!t) file_fail(error, "%.200s: %.300s", path, reason);
    return t;
}
