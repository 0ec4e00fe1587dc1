# Shared by the steps of images/build: where things go, when a step is done, and a private view of the package archive.
# shellcheck shell=bash
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$here/out
mkdir -p "$out"

say() { printf 'images: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# A step is done when its stamp holds the key of everything it was made from; a half-made output never has a stamp.
key_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_done() { [ "$(cat "$out/.stamp.$1" 2>/dev/null)" = "$2" ]; }
mark_done() { printf '%s\n' "$2" >"$out/.stamp.$1"; }

# The archive that this machine already trusts and uses, plus its sources and its backports, in lists of our own: the system's
# lists and settings are read, never changed.
apt_dir=$out/apt
apt_options=(
    -o "Dir::Etc::sourcelist=$apt_dir/sources.list"
    -o "Dir::Etc::sourceparts=$apt_dir/empty"
    -o "Dir::Etc::preferencesparts=$apt_dir/empty"
    -o "Dir::State::lists=$apt_dir/lists"
    -o "Dir::Cache=$apt_dir/cache"
    -o "APT::Sandbox::User="
    -o "Acquire::Retries=3"
)

private_apt() {
    local command=$1
    shift
    "$command" "${apt_options[@]}" "$@"
}

write_sources() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed="" codename uri suite component origin
    [ -e "$keyring" ] && signed="[signed-by=$keyring] "
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    # The origin of a suite is known only once its lists were fetched: an empty one is taken for Debian's too.
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)' 'Created-By: Packages' | sort -u |
        while read -r uri suite component origin; do
            case $origin in Debian | '' | '$(ORIGIN)') ;; *) continue ;; esac
            [ "${suite#"$codename"}" != "$suite" ] || continue
            echo "deb ${signed}$uri $suite $component"
            echo "deb-src ${signed}$uri $suite $component"
            if [ "$suite" = "$codename" ]; then echo "deb ${signed}$uri $suite-backports $component"; fi
        done >"$apt_dir/sources.list"
    [ -s "$apt_dir/sources.list" ] || die "no Debian suite is configured for apt on this machine"
}

# Fetches the package lists at most once a day: they are only needed when a step has something to fetch.
refresh_lists() {
    if [ -n "$(find "$apt_dir/refreshed" -mmin -1440 2>/dev/null)" ]; then return; fi
    say "fetching package lists"
    mkdir -p "$apt_dir/lists/partial" "$apt_dir/cache/archives/partial" "$apt_dir/empty"
    write_sources
    private_apt apt-get -qq update || say "some package lists could not be fetched; going on with the others"
    touch "$apt_dir/refreshed"
}

# All that `apt-get install` of these packages would bring to an empty machine, as name=version lines.
closure() {
    private_apt apt-get -s -o Dir::State::status=/dev/null install --no-install-recommends "$@" |
        sed -nE 's/^Inst ([^ ]+) \(([^ ]+) .*/\1=\2/p'
}

# fetch_into DIR PACKAGE...: downloads and unpacks packages below DIR; nothing is installed.
fetch_into() {
    local dir=$1 debs
    shift
    debs=$(mktemp -d "$out/.debs.XXXXXX")
    (cd "$debs" && private_apt apt-get -qq download "$@") || die "cannot download: $*"
    mkdir -p "$dir"
    for deb in "$debs"/*.deb; do dpkg-deb -x "$deb" "$dir"; done
    rm -rf "$debs"
}
