# SPDX-License-Identifier: MIT
# metal_emulator: every .metal of src/gpu/shaders, and the tests' own, compiled as they are by a C++ compiler against the stand-in
# for Metal's library that lies here; what runs them; and the stand-in for macOS that the device drives.
if(NOT TARGET vjp-metal OR APPLE OR VJP_SANITIZE MATCHES thread OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|aarch64|arm64")
  return()
endif()
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(STATUS "vjp: no C++ compiler: the Metal backend's kernels are not run")
  return()
endif()
enable_language(CXX)
set(here ${CMAKE_CURRENT_SOURCE_DIR}/metal)
set(cxx_flags -std=c++17 -ffp-contract=off -fno-math-errno -fno-exceptions -fno-rtti -Wall -Wextra
    $<$<BOOL:${VJP_WERROR}>:-Werror>)

add_library(metal_emulator STATIC ${here}/emulate.cpp ${here}/stand_in.c)
target_compile_options(metal_emulator PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${cxx_flags};-O2>)
target_include_directories(metal_emulator PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_definitions(metal_emulator PRIVATE $<$<COMPILE_LANGUAGE:C>:_DEFAULT_SOURCE>)

file(GLOB own_shaders CONFIGURE_DEPENDS ${here}/*.metal)
foreach(file ${VJP_METAL_SHADERS} ${own_shaders})
  get_filename_component(name ${file} NAME_WE)
  add_library(metal_shader_${name} OBJECT ${here}/shader.cpp)
  set_source_files_properties(${here}/shader.cpp PROPERTIES OBJECT_DEPENDS "")
  target_compile_definitions(metal_shader_${name} PRIVATE SHADER=${name} SHADER_FILE="${name}.metal")
  target_include_directories(metal_shader_${name} PRIVATE ${here} ${PROJECT_SOURCE_DIR}/src/gpu/shaders)
  # -g1: a race is told with its line. Attributes and pragmas are Metal's.
  target_compile_options(metal_shader_${name} PRIVATE ${cxx_flags} -O2 -g1 -fno-strict-aliasing -fsanitize=thread
    -Wno-attributes -Wno-unknown-attributes -Wno-unknown-pragmas -Wno-unused)
  target_sources(metal_emulator PUBLIC $<TARGET_OBJECTS:metal_shader_${name}>)
endforeach()
