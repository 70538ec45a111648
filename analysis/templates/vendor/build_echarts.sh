#!/bin/sh
# Writes echarts.min.js beside this file: Apache ECharts cut to what echarts_entry.js names. Needs node, npm and the registry.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/echarts_entry.js" "$work/"
cd "$work"
npm install --no-audit --no-fund --silent echarts@6.1.0 zrender@6.1.0 esbuild@0.28.2
npx esbuild echarts_entry.js --bundle --minify --format=iife --target=es2020 --legal-comments=none --outfile=echarts.min.js \
  --banner:js='/* Apache ECharts 6.1.0, cut to what echarts_entry.js names: built by build_echarts.sh, licences beside it. */'
cp echarts.min.js "$here/"
cp node_modules/echarts/LICENSE "$here/echarts.LICENSE"
cp node_modules/echarts/NOTICE "$here/echarts.NOTICE"
cp node_modules/zrender/LICENSE "$here/zrender.LICENSE"
cp node_modules/echarts/licenses/LICENSE-d3 "$here/d3.LICENSE"
wc -c "$here/echarts.min.js"
