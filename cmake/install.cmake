# SPDX-License-Identifier: MIT
# What `cmake --install` installs: both libraries, the header, the program, a CMake package and vjp.pc. All paths are
# relative, so an installed prefix can be moved.
#
# The shared library links its dependencies itself. The static one cannot: its users must link them, so the installed
# target and Libs.private name them, by -l where the linker finds them and by path elsewhere.
set(private_libraries "")
get_target_property(linked_libraries vjp_dependencies INTERFACE_LINK_LIBRARIES)
if(NOT linked_libraries)
  set(linked_libraries "")
endif()
foreach(library ${linked_libraries})
  get_filename_component(name ${library} NAME_WE)
  set(private_library ${library})
  foreach(folder ${CMAKE_C_IMPLICIT_LINK_DIRECTORIES})
    if(EXISTS ${folder}/${name}${CMAKE_SHARED_LIBRARY_SUFFIX})
      string(REGEX REPLACE "^lib" "" private_library ${name})
    endif()
  endforeach()
  list(APPEND private_libraries ${private_library})
endforeach()
foreach(library ${private_libraries})
  target_link_libraries(vjp_static PRIVATE $<INSTALL_INTERFACE:${library}>)
endforeach()

# The same names in a project that uses add_subdirectory().
set_target_properties(vjp_shared PROPERTIES EXPORT_NAME vjp)
add_library(vjp::vjp ALIAS vjp_shared)
add_library(vjp::vjp_static ALIAS vjp_static)

install(TARGETS vjp_shared vjp_static EXPORT vjp-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/vjp.h include/vjp_ops.h include/vjp_backend.h include/vjp_engine.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
foreach(kind cuda webgpu metal openmpi mpich nccl)
  if(TARGET vjp-${kind})
    install(TARGETS vjp-${kind} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
endforeach()
if(TARGET vjp)
  install(TARGETS vjp RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# ---- CMake: find_package(vjp) gives vjp::vjp (shared) and vjp::vjp_static --------------------------------
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/vjp)
install(EXPORT vjp-targets NAMESPACE vjp:: DESTINATION ${package_folder})
configure_package_config_file(cmake/vjp-config.cmake.in ${PROJECT_BINARY_DIR}/vjp-config.cmake
  INSTALL_DESTINATION ${package_folder})
# Before 1.0 a minor version may change the interface, as the library's soname says too.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/vjp-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/vjp-config.cmake ${PROJECT_BINARY_DIR}/vjp-config-version.cmake
  DESTINATION ${package_folder})

# ---- pkg-config -------------------------------------------------------------------------------------------
set(VJP_PC_PRIVATE "")
string(REPLACE Threads::Threads "${CMAKE_THREAD_LIBS_INIT}" system_libraries "${VJP_SYSTEM_LIBRARIES}")
foreach(library ${private_libraries} ${system_libraries})
  if(library MATCHES "^[-/]")
    string(APPEND VJP_PC_PRIVATE " ${library}")
  else()
    string(APPEND VJP_PC_PRIVATE " -l${library}")
  endif()
endforeach()
file(RELATIVE_PATH VJP_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" VJP_PC_PREFIX "${VJP_PC_PREFIX}")
configure_file(cmake/vjp.pc.in ${PROJECT_BINARY_DIR}/vjp.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/vjp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
