// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A plugin of g++ with one pragma, for headers that are precompiled: `#pragma zero instantiate`
// instantiates the templates that the inline functions above it need. Without it g++ leaves that to
// the end of every file that reads the precompiled header, where it takes most of the time.
// clang has -fpch-instantiate-templates for this.
#include <gcc-plugin.h>
#include <plugin-version.h>

// Behind gcc-plugin.h, which declares what they use.
#include <tree.h>

#include <c-family/c-pragma.h>
#include <cp/cp-tree.h>

int plugin_is_GPL_compatible;

namespace {

void instantiate(cpp_reader*) { instantiate_pending_templates(0); }

void register_pragma(void*, void*) { c_register_pragma("zero", "instantiate", instantiate); }

}  // namespace

int plugin_init(plugin_name_args* plugin, plugin_gcc_version* compiler) {
  // Types of another compiler than the headers' may have other members. A build that was configured
  // before an upgrade then goes on without the pragma.
  if (!plugin_default_version_check(compiler, &gcc_version)) return 0;
  register_callback(plugin->base_name, PLUGIN_PRAGMAS, register_pragma, nullptr);
  return 0;
}
