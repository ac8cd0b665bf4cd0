/* SPDX-License-Identifier: MIT */
/* Members of the objects in a tokenizer.json; see read_members.h. */
#include "text/read_members.h"

bool members_only(const member_reader *r, const char *const *names) {
    if (r->object->type != JSON_OBJECT) return file_fail(r->error, "%s is not an object", r->where);
    for (const json_value *v = r->object->first; v; v = v->next) {
        const char *const *name = names;
        while (*name && strcmp(*name, v->key) != 0)
            name++;
        if (!*name) return file_fail(r->error, "%s has the unknown member \"%.64s\"", r->where, v->key);
    }
    return true;
}

static bool missing(const member_reader *r, const char *name, const json_value *value, const char *what) {
    char shown[JSON_SHOWN];
    if (!value) return file_fail(r->error, "%s has no \"%s\"", r->where, name);
    return file_fail(r->error, "\"%s\" of %s is %s; it must be %s", name, r->where, json_show(value, shown), what);
}

bool member_text(const member_reader *r, const char *name, const char **text) {
    const json_value *value = json_member(r->object, name);
    if (!value || value->type != JSON_STRING) return missing(r, name, value, "a text");
    *text = value->text;
    return true;
}

bool member_boolean(const member_reader *r, const char *name, bool fallback, bool *value) {
    const json_value *member = json_member(r->object, name);
    *value = fallback;
    if (!member || member->type == JSON_NULL) return true;
    if (member->type != JSON_BOOLEAN) return missing(r, name, member, "true or false");
    *value = member->boolean;
    return true;
}

bool member_integer(const member_reader *r, const char *name, int64_t min, int64_t max, int64_t *value) {
    const json_value *member = json_member(r->object, name);
    bool right =
        member && member->type == JSON_NUMBER && member->exact && member->integer >= min && member->integer <= max;
    if (right) *value = member->integer;
    return right || missing(r, name, member, "an integer in its range");
}

bool member_list(const member_reader *r, const char *name, const json_value **list) {
    *list = json_member(r->object, name);
    return (*list && (*list)->type == JSON_ARRAY) || missing(r, name, *list, "a list");
}

bool member_search(const member_reader *r, const char *name, search *what) {
    const json_value *value = json_member(r->object, name);
    const json_value *text = json_member(value, "String"), *expression = json_member(value, "Regex");
    const json_value *one = text ? text : expression;
    if (!one || one->type != JSON_STRING || value->count != 1)
        return missing(r, name, value, "an object with \"String\" or \"Regex\"");
    if (text) {
        *what = (search){.text = text->text, .length = strlen(text->text)};
        return what->length || file_fail(r->error, "\"%s\" of %s is an empty text", name, r->where);
    }
    char reason[FILE_ERROR];
    what->expression = pattern_compile(expression->text, reason);
    return what->expression || file_fail(r->error, "%s: %.400s", r->where, reason);
}

bool member_type(const member_reader *r, const char **type) {
    if (r->object->type != JSON_OBJECT) return file_fail(r->error, "%s is not an object", r->where);
    return member_text(r, "type", type);
}

bool unknown_type(const member_reader *r, const char *type, const char *known) {
    return file_fail(r->error, "%s is \"%.64s\", which is not supported; supported are %s", r->where, type, known);
}
