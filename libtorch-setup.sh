#!/bin/sh
# Puts the libtorch that this crate's `tch` wants where plain cargo finds it.
#
# What it makes lies in one folder, keyed by version and flavour, so that clones share it:
#
#   ~/.cache/gradprism/libtorch-2.13.0-cpu/libtorch/{include,lib,build-version}   <- LIBTORCH
#                                          nvidia/cu13/lib/                       <- from NVIDIA's wheels
#
# `nvidia` stands two folders above libtorch/lib because the run path inside PyPI's libtorch_cpu.so
# says so ($ORIGIN/../../nvidia/cu13/lib): that build is linked to CUDA's runtime even on the CPU.
set -eu

usage() {
    cat <<'END'
Usage: libtorch-setup.sh [--cpu | --cuda | --zip FILE]

Puts the libtorch that the `tch` in Cargo.lock wants into ~/.cache/gradprism (or XDG_CACHE_HOME)
and writes .cargo/config.toml, so that plain `cargo build`, `cargo test` and `cargo run` find it.
Without an option: keeps what an earlier run recorded there if it still fits, else makes --cpu.

  --cpu        libtorch for the CPU, from the PyPI wheel of torch (a download of 540 MB)
  --cuda       libtorch with CUDA, from the PyPI wheels of torch and NVIDIA (some 2.5 GB)
  --zip FILE   an official libtorch archive that you have downloaded
  --help       this text

An exported LIBTORCH, or LIBTORCH_USE_PYTORCH=1 with a Python that has torch, is checked and used;
nothing is downloaded then.
END
}

# The one place that says which libtorch each tch release is made for, newest last.
KNOWN='0.24 2.11.0
0.25 2.12.0
0.26 2.13.0'

MARKER='# Written by libtorch-setup.sh, which may rewrite it. Without this line it will not.'

say() { printf '%s\n' "libtorch-setup: $*"; }
note() { say "$@" >&2; }
die() { note "$@"; exit 1; }
bad_usage() { note "$@"; usage >&2; exit 2; }
show_log() { tail -n "$1" "$stage/log" | sed 's/^/    /' >&2; } # $1: how many lines

# --- versions -------------------------------------------------------------------------------------

# Sets `tch` (0.26) and `want` (2.13.0) from Cargo.lock, which holds the release that cargo builds.
find_wanted_version() {
    tch=''
    if [ -f "$here/Cargo.lock" ]; then
        tch=$(tr -d '\r' <"$here/Cargo.lock" | awk -F'"' '
            /^name = / { name = $2 }
            /^version = / && name == "tch" { split($2, v, "."); print v[1] "." v[2]; exit }')
    fi
    if [ -z "$tch" ]; then
        tch=$(printf '%s\n' "$KNOWN" | sed -n '$s/ .*//p')
        note "no tch in $here/Cargo.lock yet: assuming tch $tch, the newest that this script knows"
    fi
    want=$(printf '%s\n' "$KNOWN" | awk -v tch="$tch" '$1 == tch { print $2 }')
    [ -n "$want" ] || die "Cargo.lock has tch $tch, but this script knows only tch" \
        "$(printf '%s\n' "$KNOWN" | sed 's/ .*//' | tr '\n' ' ')- add '$tch <its libtorch>' to KNOWN in $0" \
        "(the build.rs of torch-sys names that version), or set tch back in Cargo.toml."
}

# Prints the version of the libtorch in folder $1 with its headers in $2/include; "" if unknown.
version_in() {
    if [ -f "$1/build-version" ]; then
        head -n 1 "$1/build-version" | tr -d ' \r'
        return
    fi
    for header in torch/headeronly/version.h torch/csrc/api/include/torch/version.h; do
        [ -f "$2/include/$header" ] || continue
        awk '/^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) / { v = v "." $3 } END { print substr(v, 2) }' \
            "$2/include/$header"
        return
    done
}

require_version() { # $1: what has the version, $2: the version (2.13.0+cpu), $3: the remedy
    if [ "${2%%+*}" = "$want" ]; then return; fi
    if [ -z "$2" ]; then
        note "$1 does not tell its version: cannot check that it is $want, which tch $tch wants"
    elif [ -n "${LIBTORCH_BYPASS_VERSION_CHECK+set}" ]; then
        note "$1 is libtorch $2, tch $tch wants $want: let pass, since LIBTORCH_BYPASS_VERSION_CHECK is set"
    else
        die "$1 is libtorch $2, but tch $tch wants libtorch $want. $3"
    fi
}

# --- what must be there ---------------------------------------------------------------------------

require_platform() {
    arch=$(uname -m)
    case $(uname -s)-$arch in
        Linux-x86_64 | Linux-aarch64) ;;
        *) die "this script serves Linux on x86_64 and aarch64, and this is $(uname -s) on $arch." \
            "Install libtorch $want by hand and export LIBTORCH=<its folder> before you call cargo." ;;
    esac
}

# c++ compiles torch-sys, cc is the linker that Rust calls, nm comes with either.
require_compilers() {
    for tool in cc "${CXX:-c++}" nm; do
        command -v "${tool%% *}" >/dev/null 2>&1 || die "no ${tool%% *} found, and torch-sys compiles and links C++." \
            "Debian, Ubuntu: sudo apt-get install g++. Fedora: sudo dnf install gcc-c++."
    done
}

# Sets `python` to the interpreter itself: a wrapper (pyenv has one) would take the kill of `clean_up`
# on itself and let its child run on.
find_python() {
    for python in python3 python; do
        python=$("$python" -c 'import sys; assert sys.version_info >= (3, 6); print(sys.executable)' 2>/dev/null) || continue
        return
    done
    die "no Python 3 found, which fetches and unpacks the wheels." \
        "Debian, Ubuntu: sudo apt-get install python3 python3-pip. Fedora: sudo dnf install python3-pip."
}

# Any pip will do, one of an "externally managed" Python too: it only downloads, and for the Python
# named in `fetch`, not for its own. So a user's rule to install only in a virtualenv is not meant.
find_pip() {
    export PIP_REQUIRE_VIRTUALENV=0
    for pip in "$python" /usr/bin/python3 pip3 pip; do
        case $pip in pip*) as_module='' ;; *) as_module='-m pip' ;; esac
        # shellcheck disable=SC2086 # $as_module is no word or two
        pip_version=$("$pip" $as_module --version 2>/dev/null | awk '{ print $2 }')
        [ -z "$pip_version" ] || break
    done
    [ -n "$pip_version" ] || die "no pip found ('$python -m pip', pip3 and pip all fail)." \
        "Debian, Ubuntu: sudo apt-get install python3-pip. Fedora: sudo dnf install python3-pip." \
        "Or fetch a libtorch $want archive and give it with --zip."
    case $pip_version in
        ?.* | 1?.* | 20.[0-2] | 20.[0-2].*) die "pip $pip_version does not know the manylinux_2_28 wheels" \
            "of torch, pip 20.3 or newer does. Run: $pip $as_module install --upgrade pip" ;;
    esac
}

require_glibc() {
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || glibc='another C library'
    printf '%s\n' "$glibc" | awk '{ split($2, v, "."); exit !(v[1] + v[2] / 1000 >= 2.028) }' ||
        die "the wheels of torch need glibc 2.28 or newer, and this system has $glibc." \
            "Use a newer system, or build libtorch $want here and export LIBTORCH=<its folder>."
}

require_space() { # $1: megabytes needed at the peak, half-made files included
    free=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free" -ge "$1" ] || die "$root has $free MB free, and this needs $1 MB." \
        "Make room, or set XDG_CACHE_HOME to a folder on a larger disk."
}

# --- long steps -----------------------------------------------------------------------------------

# In the cache folder, not in /tmp: the last step is then a rename, and /tmp may be small.
open_stage() {
    mkdir -p "$root" 2>/dev/null || die "cannot make the folder $root. Set XDG_CACHE_HOME to a folder of yours."
    # No trap runs when a machine is switched off: what is a day old belongs to nobody.
    find "$root" -maxdepth 1 -name '.setup-*' -mtime +0 -exec rm -rf {} + 2>/dev/null || :
    stage=$(mktemp -d "$root/.setup-XXXXXX") || die "cannot write to $root. Set XDG_CACHE_HOME to a folder of yours."
    mkdir "$stage/made" "$stage/tmp" "$stage/wheels"
    export TMPDIR="$stage/tmp"
}

# Whatever ends the script, nothing half-made stays. First the child, which still writes there.
clean_up() {
    trap '' HUP INT TERM
    stop_ticker
    if [ -n "$child" ]; then
        kill "$child" 2>/dev/null || :
        wait "$child" 2>/dev/null || :
    fi
    [ -z "$stage" ] || rm -rf "$stage"
}

# Runs "$@", its output in $stage/log. In the background, since a shell answers a signal at once
# during `wait`, but not before a command in the foreground has ended.
run() {
    "$@" >"$stage/log" 2>&1 &
    child=$!
    rc=0
    wait "$child" || rc=$?
    child=''
    return "$rc"
}

# Shows on a terminal how much of a download has come.
start_ticker() {
    [ -t 2 ] || return 0
    while sleep 1; do printf '\r%s MB ' "$(du -sm "$stage/tmp" 2>/dev/null | cut -f 1)" >&2; done &
    ticker=$!
}

stop_ticker() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || :
    wait "$ticker" 2>/dev/null || :
    ticker=''
    printf '\r        \r' >&2
}

# Downloads the wheels of the requirements "$@" into $stage/wheels. The Python version selects one of
# several wheels of torch; their libtorch is the same.
fetch() {
    platforms="--platform manylinux2014_$arch"
    minor=28 # torch's glibc, and pip wants each older one by name: NVIDIA's wheels carry many
    while [ "$minor" -ge 5 ]; do
        platforms="$platforms --platform manylinux_2_${minor}_$arch"
        minor=$((minor - 1))
    done
    start_ticker
    rc=0
    # shellcheck disable=SC2086 # $as_module and $platforms are lists of words
    run "$pip" $as_module download --disable-pip-version-check --progress-bar off \
        --only-binary=:all: --implementation cp --python-version 3.11 --abi cp311 $platforms \
        --dest "$stage/wheels" "$@" || rc=$?
    stop_ticker
    [ "$rc" -ne 0 ] || return 0
    show_log 8
    die "pip $pip_version could not download the wheels of torch $want; its last lines stand above. If it is
    the connection: behind a proxy export https_proxy, for a mirror set PIP_INDEX_URL, and run this again;
    a missing distribution: upgrade pip, or take a mirror that has it;
    a full disk (the lines may be cut off then): make room, or set XDG_CACHE_HOME to a larger one.
    Or fetch an official libtorch $want archive elsewhere and give it with --zip."
}

# Unpacks from the archive argv[1] into the folder argv[2] what matches a rule "regex=new name".
UNPACK='
import os, re, shutil, sys, zipfile
archive, target, rules = sys.argv[1], sys.argv[2], [rule.split("=", 1) for rule in sys.argv[3:]]
with zipfile.ZipFile(archive) as z:
    for info in z.infolist():
        name = next((re.sub(old, new, info.filename) for old, new in rules if re.match(old, info.filename)), "/")
        if name.endswith("/"):
            continue
        if ".." in name.split("/"):
            sys.exit("unsafe path in the archive: " + info.filename)
        path = os.path.join(target, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with z.open(info) as source, open(path, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
'

unpack() {
    run "$python" -c "$UNPACK" "$@" && return
    show_log 3
    die "could not unpack $1; the reason stands above. Is the file whole, and is there room on the disk?"
}

# --- making one -----------------------------------------------------------------------------------

# Prints what the wheel argv[1] requires from NVIDIA: everything, or for argv[2] "cpu" the two
# libraries (runtime, profiler) that the CPU part of a CUDA build is linked to; nothing for a CPU build.
# Newer wheels name them as extras of "cuda-toolkit", older ones one by one.
REQUIREMENTS='
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as z:
    if "torch/lib/libtorch_cuda.so" not in z.namelist():
        sys.exit()
    metadata = next(name for name in z.namelist() if name.endswith(".dist-info/METADATA"))
    header = z.read(metadata).decode().split("\n\n", 1)[0]
for name, rest in re.findall(r"^Requires-Dist: *(cuda-toolkit|nvidia-[\w-]+)(.*)", header, re.M):
    if sys.argv[2] == "cpu":
        if not re.match("cuda-toolkit|nvidia-cuda-(runtime|cupti)", name):
            continue
        rest = re.sub(r"^\[.*?\]", "[cudart,cupti]", rest)
    if "extra ==" not in rest:
        print(name + rest)
'

make_from_wheels() { # $1: cpu or cu13
    find_pip
    require_glibc
    # Left out are Python's own parts and, for the CPU, CUDA's with the libtorch.so that pulls them in.
    skip='libtorch_python|libshm'
    megabytes=8000
    if [ "$1" = cpu ]; then
        skip="$skip|libtorch_cuda|libc10_cuda|libcaffe2_nvrtc|libtorch_nvshmem|libtorch\\.so"
        megabytes=1800
    fi
    require_space "$megabytes"

    note "downloading torch $want ..."
    fetch --no-deps "torch==$want"
    wheel=$(echo "$stage"/wheels/torch-*.whl)
    note "unpacking torch $want ..."
    unpack "$wheel" "$stage/made" '^torch/(include/.*)=libtorch/\1' '^torch/version\.py=version.py' \
        "^torch/(lib/(?!$skip)[^/]*\\.so[^/]*)\$=libtorch/\\1"
    build=$(sed -n "s/^__version__ = '\\(.*\\)'.*/\\1/p" "$stage/made/version.py")
    rm "$stage/made/version.py"
    add_nvidia_libraries "$1"

    lib=$stage/made/libtorch/lib
    if [ "$1" = cpu ]; then
        build=$want+cpu
        make_stub
    fi
    # torch-sys links `gomp`, and a linker looks for the name without a number.
    [ ! -f "$lib/libgomp.so.1" ] || ln -s libgomp.so.1 "$lib/libgomp.so"
    # Without this file torch-sys checks no version.
    printf '%s\n' "$build" >"$stage/made/libtorch/build-version"
}

add_nvidia_libraries() { # $1: cpu or cu13
    run "$python" -c "$REQUIREMENTS" "$wheel" "$1" || { show_log 3; die "could not read what $wheel requires."; }
    rm "$wheel"
    if [ ! -s "$stage/log" ]; then
        [ "$1" = cpu ] || die "the wheel of torch $want for $arch has no CUDA part. Give an official archive with --zip."
        return 0
    fi
    set --
    while IFS= read -r requirement; do set -- "$@" "$requirement"; done <"$stage/log"
    note "downloading the NVIDIA libraries that it is linked to ..."
    fetch "$@"
    for wheel in "$stage"/wheels/nvidia*.whl; do
        unpack "$wheel" "$stage/made" '^(nvidia/[^/]+/lib/[^/]*\.so[^/]*)$=\1'
        rm "$wheel"
    done
}

# An empty libtorch.so that pulls in the CPU part, in place of the wheel's, which pulls in CUDA too.
# An old-style run path, as in the wheel's: LD_LIBRARY_PATH cannot put another libtorch in its place.
make_stub() {
    # shellcheck disable=SC2016 # $ORIGIN is for the loader
    run cc -shared -nostdlib -o "$lib/libtorch.so" -x c /dev/null -L"$lib" -Wl,-soname,libtorch.so \
        -Wl,--no-as-needed -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined \
        -Wl,--disable-new-dtags '-Wl,-rpath,$ORIGIN' && return
    show_log 5
    die "cc could not link the stub libtorch.so; its message stands above. Is gcc with binutils installed and whole?"
}

# Sets `build`, the build-version of the archive $1, and `megabytes`, its size once unpacked.
inspect_zip() {
    "$python" -c 'import sys, zipfile
z = zipfile.ZipFile(sys.argv[1])
size = sum(info.file_size for info in z.infolist())
print(z.read("libtorch/build-version").decode().strip(), size // 1000000 + 100)' "$1" >"$stage/zip" 2>"$stage/log" || {
        show_log 1
        die "$1 is no official libtorch archive: expected a zip file that holds libtorch/build-version. Is it all there?"
    }
    read -r build megabytes <"$stage/zip"
    require_version "$1" "$build" "Download the archive of $want."
}

# The only step that others see. The rename fails where a folder with content stands: then another
# run was faster, and what it made is as good.
publish() {
    "$python" -c 'import os, sys; os.rename(*sys.argv[1:])' "$stage/made" "$dest" 2>/dev/null ||
        [ -d "$dest/libtorch" ] || die "could not rename $stage/made to $dest. Remove what is there and run this again."
}

# --- checking one ---------------------------------------------------------------------------------

# Dies unless $1 is a whole libtorch of the wanted version that loads, with lib in $2 and include in $3.
verify() { # $4: the remedy
    for file in "$2/lib/libtorch.so" "$2/lib/libtorch_cpu.so" "$2/lib/libc10.so" \
        "$3/include/torch/csrc/api/include/torch/torch.h" "$3/include/ATen/ATen.h"; do
        [ -f "$file" ] || die "$1 is no whole libtorch: expected $file, found nothing there. $4"
    done
    require_version "$1" "$(version_in "$1" "$3")" "$4"
    # The driver (libcuda) is no part of libtorch, and a machine that only builds has none.
    rc=0
    loaded=$(LC_ALL=C ldd "$2/lib/libtorch.so" 2>&1) || rc=$?
    wrong=$(printf '%s\n' "$loaded" | grep 'not found' | grep -v 'libcuda\.so\|libnvidia-ml') || :
    [ "$rc" -eq 0 ] || wrong=$loaded
    [ -z "$wrong" ] || die "$2/lib/libtorch.so does not load:" \
        "$(printf '%s\n' "$wrong" | sed 's/^[[:space:]]*//' | head -n 3 | tr '\n' ';') $4"
    # torch::jit::load reads every policy.
    nm -D --defined-only "$2/lib/libtorch_cpu.so" 2>/dev/null | grep -q ' T _ZN5torch3jit4load' ||
        die "$2/lib/libtorch_cpu.so defines no torch::jit::load: it is cut off, or no libtorch. $4"
}

# --- .cargo/config.toml ---------------------------------------------------------------------------

is_ours() { head -n 1 "$1" 2>/dev/null | grep -qxF "$MARKER"; }

# Prints the LIBTORCH that an earlier run recorded, "" if none.
recorded() {
    if is_ours "$config"; then
        sed -n 's/^LIBTORCH = { value = "\(.*\)", force = false }$/\1/p' "$config" | sed 's/\\\(.\)/\1/g'
    fi
}

# Makes LIBTORCH=$1 the default of cargo calls here; an exported one still wins (force = false).
# Writes only what has changed, since cargo compiles torch-sys anew then, and into no one else's file.
record() {
    case $1 in *[[:cntrl:]]*) die "the path '$1' holds a control character: .cargo/config.toml cannot hold it." ;; esac
    line="LIBTORCH = { value = \"$(printf '%s' "$1" | sed 's/[\\"]/\\&/g')\", force = false }"
    for file in "$here/.cargo/config" "$config"; do # cargo prefers the first, its older name
        [ -e "$file" ] || continue
        if grep -qxF "$line" "$file"; then return 0; fi
        is_ours "$file" || die "libtorch is ready, but $file is not this script's and stays as it is." \
            "Put under its [env]:  $line"
    done
    { mkdir -p "$here/.cargo" && printf '%s\n\n[env]\n%s\n' "$MARKER" "$line" >"$config.$$" && mv "$config.$$" "$config"; } ||
        die "libtorch is ready, but $config cannot be written. Export LIBTORCH='$1' instead."
}

# --- the ways to a libtorch -----------------------------------------------------------------------

# What is exported wins over .cargo/config.toml in every cargo call, so it is what gets checked.
use_exported() {
    if [ -n "${LIBTORCH_USE_PYTORCH+set}" ]; then
        interpreter=python3
        [ -z "${VIRTUAL_ENV+set}" ] || interpreter=python # as in torch-sys
        found=$("$interpreter" -c 'import os, torch; print(os.path.dirname(os.path.abspath(torch.__file__)))' 2>&1) ||
            die "LIBTORCH_USE_PYTORCH is set, but $interpreter cannot import torch ($(printf '%s\n' "$found" | tail -n 1))." \
                "Activate the environment that has torch $want, or unset LIBTORCH_USE_PYTORCH."
        # Recorded as LIBTORCH, so that cargo works without the variable too. There is no build-version
        # in that folder, and being another program's it gets none: without the variable torch-sys
        # then checks no version, but this script does whenever it runs.
        libtorch=$(printf '%s\n' "$found" | tail -n 1)
        verify "$libtorch" "$libtorch" "$libtorch" "Install torch==$want for $interpreter, or unset LIBTORCH_USE_PYTORCH."
        record "$libtorch"
        say "the torch of $interpreter fits tch $tch and is used: $libtorch"
        return
    fi
    remedy="Point LIBTORCH to a libtorch $want, or unset it (and LIBTORCH_INCLUDE, LIBTORCH_LIB) and run this again."
    libtorch=${LIBTORCH:-}
    case $libtorch in /*) ;; *) die "LIBTORCH is '$libtorch', but must be an absolute path. $remedy" ;; esac
    verify "$libtorch" "${LIBTORCH_LIB:-$libtorch}" "${LIBTORCH_INCLUDE:-$libtorch}" "$remedy"
    if [ -n "${LIBTORCH_LIB:-}${LIBTORCH_INCLUDE:-}" ]; then
        say "LIBTORCH, LIBTORCH_LIB and LIBTORCH_INCLUDE fit tch $tch: keep them exported, .cargo/config.toml has none of them"
        return
    fi
    record "$libtorch"
    say "LIBTORCH fits tch $tch and is used: $libtorch"
}

# A run without options keeps what an earlier one chose (--cuda, --zip, LIBTORCH), if it still fits.
use_recorded() {
    libtorch=$(recorded)
    [ -n "$libtorch" ] || return 1
    found=$(version_in "$libtorch" "$libtorch")
    if [ ! -d "$libtorch" ] || { [ -n "$found" ] && [ "${found%%+*}" != "$want" ]; }; then
        note "recorded in .cargo/config.toml is $libtorch (libtorch ${found:-gone}), wanted is $want: turning to --cpu"
        return 1
    fi
    verify "$libtorch" "$libtorch" "$libtorch" "Mend or remove it and run this again with --cpu, --cuda or --zip."
    say "libtorch ${found:-of unknown version} is there and whole: $libtorch"
}

use_cache() { # $1: cpu, cuda or zip; $2: the archive
    flavour=cpu
    if [ "$1" = cuda ]; then flavour=cu13; fi
    if [ "$1" = zip ]; then
        find_python
        open_stage
        inspect_zip "$2"
        case $build in *+*) flavour=$(printf '%s' "${build#*+}" | tr -cd '[:alnum:].') ;; esac
    fi
    dest=$root/libtorch-$want-$flavour
    did='is there and whole'
    if [ ! -d "$dest/libtorch" ]; then
        if [ "$1" = zip ]; then
            require_space "$megabytes"
            note "unpacking $2 ..."
            unpack "$2" "$stage/made" '^(libtorch/.*)=\1'
        else
            find_python
            open_stage
            make_from_wheels "$flavour"
        fi
        made=$stage/made/libtorch
        verify "$made" "$made" "$made" "Nothing of it is kept. Is what it was made from whole, and for Linux on $arch?"
        publish
        did='made and checked'
    fi
    verify "$dest/libtorch" "$dest/libtorch" "$dest/libtorch" "Remove it (rm -r '$dest') and run this again."
    record "$dest/libtorch"
    say "libtorch $(cat "$dest/libtorch/build-version") $did: $dest/libtorch"
}

# --- main -----------------------------------------------------------------------------------------

asked='' archive=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --cpu | --cuda | --zip) ;;
        *) bad_usage "unknown option '$1'" ;;
    esac
    [ -z "$asked" ] || bad_usage "--$asked and $1 exclude each other"
    asked=${1#--}
    if [ "$asked" = zip ]; then
        [ $# -gt 1 ] || bad_usage "--zip needs the path of an archive"
        archive=$2
        shift
    fi
    shift
done

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
config=$here/.cargo/config.toml
case ${XDG_CACHE_HOME:-} in
    /*) root=$XDG_CACHE_HOME/gradprism ;;
    *) root=${HOME:?is not set: set it or XDG_CACHE_HOME}/.cache/gradprism ;; # a relative one is void, says its standard
esac
stage='' child='' ticker=''
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

find_wanted_version
require_platform
require_compilers
if [ -n "${LIBTORCH+set}${LIBTORCH_USE_PYTORCH+set}${LIBTORCH_INCLUDE:-}${LIBTORCH_LIB:-}" ]; then
    [ -z "$asked" ] || { note "--$asked has no effect while LIBTORCH, LIBTORCH_USE_PYTORCH, LIBTORCH_INCLUDE or" \
        "LIBTORCH_LIB is exported, which cargo prefers: unset it first"; exit 2; }
    use_exported
elif [ -n "$asked" ] || ! use_recorded; then
    use_cache "${asked:-cpu}" "$archive"
fi
