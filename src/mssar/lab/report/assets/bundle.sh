#!/bin/sh
# Makes echarts.min.js anew: sh bundle.sh. Needs npm; works in a temporary folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/echarts.entry.js" "$work"
cd "$work"
npm init --yes >/dev/null
npm install --save-exact --no-audit --no-fund echarts@6.1.0 zrender@6.1.0 tslib@2.3.0 esbuild@0.28.2
{
  echo '/*!'
  echo 'Parts of Apache ECharts 6.1.0 and ZRender 6.1.0, bundled; README.md says how.'
  echo
  cat node_modules/echarts/NOTICE
  echo
  echo
  echo 'ECharts is licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0'
  echo 'It includes tslib 2.3.0, Copyright (c) Microsoft Corporation, under 0BSD; code from D3,'
  echo 'Copyright 2010-2016 Mike Bostock, under the same terms as ZRender; and ZRender:'
  echo
  cat node_modules/zrender/LICENSE
  echo '*/'
} >header
npx esbuild echarts.entry.js --bundle --minify --format=iife --global-name=echarts \
  --target=es2020 --charset=utf8 --legal-comments=none \
  --define:process.env.NODE_ENV='"production"' --outfile=body.js
cat header body.js >"$here/echarts.min.js"
