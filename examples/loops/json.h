/* A JSON reader, large enough for manifest.json. What it gives is never freed: a manifest is read once. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Json {
  char* key;          /* in an object */
  char* text;         /* of a string */
  double number;      /* of a number, true or false */
  int size;           /* of an object or a list */
  struct Json* first; /* its members, */
  struct Json* next;  /* one behind the other */
} Json;

static const char* json_space(const char* s) { return s + strspn(s, " \t\r\n"); }

static void json_cut(void) { exit(fprintf(stderr, "manifest.json is cut\n")); }

static const char* json_string(const char* s, char** out) {
  char* to = *out = (char*)malloc(strlen(s) + 1);
  if (*s != '"') json_cut();
  for (s++; *s != '"'; s++) {
    if (*s == 0 || (*s == '\\' && (s[1] == 0 || (s[1] == 'u' && strlen(s) < 6)))) json_cut();
    if (*s != '\\') {
      *to++ = *s;
    } else if (*++s == 'u') { /* one of the first 65,536 characters, as UTF-8 */
      char digits[5] = {s[1], s[2], s[3], s[4], 0};
      unsigned code = (unsigned)strtoul(digits, 0, 16);
      if (code > 0x7FF) *to++ = (char)(0xE0 | code >> 12);
      if (code > 0x7F) *to++ = (char)(code > 0x7FF ? 0x80 | (code >> 6 & 0x3F) : 0xC0 | code >> 6);
      *to++ = (char)(code > 0x7F ? 0x80 | (code & 0x3F) : code);
      s += 4;
    } else {
      *to++ = *s == 'n' ? '\n' : *s == 't' ? '\t' : *s;
    }
  }
  *to = 0;
  return s + 1;
}

static const char* json_value(const char* s, Json* out) {
  s = json_space(s);
  if (*s == '"') return json_string(s, &out->text);
  if (*s != '{' && *s != '[') {
    char* end = NULL;
    out->number = *s == 't' ? 1 : strtod(s, &end);
    size_t letters = *s == 't' || *s == 'n' ? 4 : *s == 'f' ? 5 : 0;
    if (letters ? strlen(s) < letters : end == s) json_cut();
    return letters ? s + letters : end;
  }
  char close = *s == '{' ? '}' : ']';
  Json** last = &out->first;
  for (s = json_space(s + 1); *s != close; s = json_space(s + (*s == ','))) {
    if (*s == 0) json_cut();
    Json* member = *last = (Json*)calloc(1, sizeof(Json));
    if (close == '}') {
      s = json_space(json_string(json_space(s), &member->key));
      if (*s++ != ':') json_cut();
    }
    s = json_space(json_value(s, member));
    last = &member->next;
    out->size++;
  }
  return s + 1;
}

/* The member of that name; NULL if there is none. */
static Json* json_find(const Json* object, const char* key) {
  for (Json* m = object->first; m; m = m->next)
    if (m->key && strcmp(m->key, key) == 0) return m;
  return NULL;
}

static Json* json_get(const Json* object, const char* key) {
  Json* found = json_find(object, key);
  if (!found) exit(fprintf(stderr, "manifest.json has no %s\n", key));
  return found;
}
