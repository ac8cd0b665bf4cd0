/* SPDX-License-Identifier: MIT */
/* See chat.h. A template is known by its tokens: the Jinja program in tokenizer_config.json is not run. */
#include "text/chat.h"

static const chat_template templates[] = {
    {"Llama 3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "<|eot_id|>"},
    {"ChatML", "", "<|im_start|>", "\n", "<|im_end|>\n", "<|im_end|>"},
};

enum { TEMPLATES = sizeof templates / sizeof templates[0] };

const chat_template *chat_template_of(const tokenizer *t, char error[FILE_ERROR]) {
    for (int i = 0; t && i < TEMPLATES; i++)
        if (tokenizer_find(t, templates[i].before_role) >= 0 && tokenizer_find(t, templates[i].end) >= 0)
            return &templates[i];
    file_fail(error, "the model has no chat template that vjp knows: its tokenizer has neither the tokens "
                     "<|start_header_id|> and <|eot_id|> of Llama 3 nor <|im_start|> and <|im_end|> of ChatML");
    return NULL;
}

static bool add(byte_list *to, const char *text) {
    return byte_list_add(to, text, strlen(text));
}

bool chat_add_message(const chat_template *chat, const char *role, const char *text, byte_list *to) {
    static const char blanks[] = " \t\r\n\v\f";
    text += strspn(text, blanks);
    size_t length = strlen(text);
    while (length && strchr(blanks, text[length - 1]))
        length--;
    return add(to, chat->before_role) && add(to, role) && add(to, chat->before) && byte_list_add(to, text, length) &&
           add(to, chat->after);
}

bool chat_add_answer(const chat_template *chat, byte_list *to) {
    return add(to, chat->before_role) && add(to, "assistant") && add(to, chat->before);
}
