#!/bin/sh
# Unpack Debian's redis-server, which is built with TLS, into a folder, without installing it:
#   scripts/debian_redis.sh FOLDER
# FOLDER/redis-server runs it. Does nothing if it exists already.
set -eu
folder=$1
[ ! -x "$folder/redis-server" ] || exit 0
command -v apt-get > /dev/null || { echo "no apt-get: Debian's redis-server cannot be had here" >&2; exit 1; }
mkdir -p "$folder/packages"
cd "$folder/packages"
apt-get download -qq redis-tools liblzf1 libjemalloc2 2> apt.log || { cat apt.log >&2; exit 1; }
for package in *.deb; do dpkg-deb -x "$package" ../files; done
cd ..
libraries=$(dirname "$(find "$PWD/files" -name 'liblzf.so.1' | head -n 1)")
cat > redis-server.new <<END
#!/bin/sh
LD_LIBRARY_PATH=$libraries exec -a redis-server $PWD/files/usr/bin/redis-check-rdb "\$@"
END
sed -i 's/^#!\/bin\/sh$/#!\/bin\/bash/' redis-server.new
chmod +x redis-server.new
mv redis-server.new redis-server
rm -r packages
