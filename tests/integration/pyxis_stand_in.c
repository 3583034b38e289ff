/* A stand-in for pyxis: Slurm itself parses the options, and every task is told what it got in
 * PYXIS_STUB_<OPTION>. No container is started. */
#include <ctype.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>

SPANK_PLUGIN(pyxis_stand_in, 1);

struct known {
  char *name;
  int takes_value;
  char value[4096];
};

static struct known known[] = {
    {"container-image", 1, ""},         {"container-mounts", 1, ""},
    {"container-workdir", 1, ""},       {"container-name", 1, ""},
    {"container-env", 1, ""},           {"container-mount-home", 0, ""},
    {"no-container-mount-home", 0, ""}, {"container-remap-root", 0, ""},
    {"container-writable", 0, ""},      {"container-readonly", 0, ""},
};
enum { COUNT = sizeof known / sizeof known[0] };

static int note(int index, const char *value, int remote) {
  (void)remote;
  if (index < 0 || index >= COUNT) return -1;
  snprintf(known[index].value, sizeof known[index].value, "%s", value ? value : "1");
  return 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv) {
  (void)argc;
  (void)argv;
  for (int i = 0; i < COUNT; i++) {
    struct spank_option option = {known[i].name, known[i].takes_value ? "VALUE" : NULL,
                                  "stand-in for pyxis", known[i].takes_value, i, note};
    if (spank_option_register(spank, &option) != ESPANK_SUCCESS) return -1;
  }
  return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
  (void)argc;
  (void)argv;
  for (int i = 0; i < COUNT; i++) {
    if (!known[i].value[0]) continue;
    char name[64] = "PYXIS_STUB_";
    size_t end = strlen(name);
    for (const char *c = known[i].name; *c && end < sizeof name - 1; c++)
      name[end++] = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
    name[end] = 0;
    spank_setenv(spank, name, known[i].value, 1);
  }
  return 0;
}
