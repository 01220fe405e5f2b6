// Arranges boxes in columns, with as few crossings of edges as possible. Pure.

const PASSES = 6;

/**
 * Return the length of the longest path to each node, up to `most`: Map(id → rank). An edge that closes a cycle does
 * not count, so that every other edge leads to the right.
 */
export function ranks(nodes, edges, most) {
  const out = new Map(nodes.map((node) => [node.id, []]));
  for (const edge of edges) out.get(edge.from)?.push(edge.to);
  const { order, closing } = walked(out);
  const rank = new Map(order.map((id) => [id, 0]));
  for (const id of order) {
    for (const to of out.get(id)) if (!closing.get(id).has(to)) rank.set(to, Math.max(rank.get(to), Math.min(most, rank.get(id) + 1)));
  }
  return rank;
}

/** Return the ids in topological order, and for each id the targets of its edges that close a cycle. */
function walked(out) {
  const done = [];
  const closing = new Map([...out.keys()].map((id) => [id, new Set()]));
  const entered = new Map();
  for (const root of out.keys()) {
    const way = entered.has(root) ? [] : [[root, 0]];
    while (way.length) {
      const step = way.at(-1);
      const [id, place] = step;
      entered.set(id, true);
      const to = out.get(id)[place];
      step[1] += 1;
      if (to === undefined) { way.pop(); entered.set(id, false); done.push(id); }
      else if (entered.get(to)) closing.get(id).add(to);
      else if (out.has(to) && !entered.has(to)) way.push([to, 0]);
    }
  }
  return { order: done.reverse(), closing };
}

/**
 * Arrange `nodes` ({id}) with `columnOf(node)` in columns, connected by `edges` ({from, to}).
 * An edge over several columns gets an empty place in each of them. Return `{columns: [[id]], ways: Map(edge → [id]),
 * back}`. Ids that are not nodes are such empty places. `back` are the edges that do not lead to the right.
 */
export function layered(nodes, edges, columnOf) {
  const used = [...new Set(nodes.map(columnOf))].sort((a, b) => a - b);
  const rank = new Map(nodes.map((node) => [node.id, used.indexOf(columnOf(node))]));
  const columns = used.map((one) => nodes.filter((node) => columnOf(node) === one).map((node) => node.id));
  const ways = new Map();
  const links = [];
  const back = [];
  for (const [number, edge] of edges.entries()) {
    const low = rank.get(edge.from);
    const high = rank.get(edge.to);
    if (low === undefined || high === undefined) continue;
    if (high <= low) { back.push(edge); continue; }
    const way = [edge.from];
    for (let column = low + 1; column < high; column += 1) {
      const free = `${edge.from}→${edge.to}@${column}#${number}`;
      columns[column].push(free);
      way.push(free);
    }
    way.push(edge.to);
    ways.set(edge, way);
    for (let place = 1; place < way.length; place += 1) links.push([way[place - 1], way[place]]);
  }
  for (let pass = 0; pass < PASSES; pass += 1) sort(columns, links, pass % 2 === 0);
  return { columns, ways, back };
}

function sort(columns, links, rightwards) {
  const order = rightwards ? columns.slice(1) : columns.slice(0, -1).reverse();
  for (const column of order) {
    const spots = new Map(columns.flatMap((ids) => ids.map((id, place) => [id, (place + 0.5) / ids.length])));
    const middle = (id) => {
      const near = links.filter((link) => link[rightwards ? 1 : 0] === id).map((link) => spots.get(link[rightwards ? 0 : 1]));
      return near.length ? near.reduce((sum, one) => sum + one, 0) / near.length : spots.get(id);
    };
    const keys = new Map(column.map((id) => [id, middle(id)]));
    column.sort((a, b) => keys.get(a) - keys.get(b));
  }
}
