// Places for boxes in columns, so that ways cross each other and other boxes as little as possible. Pure.

const PASSES = 6;

/**
 * Columns of places for `nodes` ({id}) with `columnOf(node)`, joined by `edges` ({from, to}).
 * A way over several columns gets a free place in each of them. Gives `{columns: [[id]], ways: Map(edge → [id])}`,
 * where ids that are not nodes are such free places.
 */
export function layered(nodes, edges, columnOf) {
  const used = [...new Set(nodes.map(columnOf))].sort((a, b) => a - b);
  const rank = new Map(nodes.map((node) => [node.id, used.indexOf(columnOf(node))]));
  const columns = used.map((one) => nodes.filter((node) => columnOf(node) === one).map((node) => node.id));
  const ways = new Map();
  const links = [];
  for (const edge of edges) {
    const low = rank.get(edge.from);
    const high = rank.get(edge.to);
    if (low === undefined || high === undefined) continue;
    const way = [edge.from];
    for (let column = low + 1; column < high; column += 1) {
      const free = `${edge.from}→${edge.to}@${column}`;
      columns[column].push(free);
      way.push(free);
    }
    way.push(edge.to);
    ways.set(edge, way);
    for (let place = 1; place < way.length; place += 1) links.push([way[place - 1], way[place]]);
  }
  for (let pass = 0; pass < PASSES; pass += 1) sort(columns, links, pass % 2 === 0);
  return { columns, ways };
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
