// The siblings of a group as one tree of what they sampled: how many took each branch, how likely its
// first token was, what they earned, and where winners and losers part.

// Tokens from the first sampled one on; a sibling's later samples are not in the tree.
function sampledFrom(rollout) {
  const sample = rollout.samples[0];
  if (!sample) return { ids: [], probs: [] };
  const first = sample.ids.findIndex((_, t) => at(sample.mask, t));
  const from = first < 0 ? sample.ids.length : first;
  return { from, sample, ids: sample.ids.slice(from) };
}

// A node: `members` share tokens [from, to) and then part, each child with those of one next token.
function grow(members, from) {
  const [first] = members;
  let to = from;
  while (members.every((each) => to < each.path.ids.length && each.path.ids[to] === first.path.ids[to])) to++;
  const next = new Map();
  for (const each of members) push(next, each.path.ids[to], each); // undefined: it ends here
  const children = members.length > 1 ? [...next].filter(([id]) => id !== undefined).map(([, each]) => grow(each, to)) : [];
  children.sort((a, b) => b.members.length - a.members.length || b.reward - a.reward);
  const node = { members, from, to: members.length > 1 ? to : first.path.ids.length, children, ended: next.get(undefined) ?? [] };
  node.reward = mean(members.map((each) => each.reward));
  node.p = mean(members.map(({ path: { sample, from: start } }) => (sample && at(sample.mask, start + from) ? Math.exp(at(sample.logprobs, start + from)) : 1)));
  return node;
}

const squares = (values) => values.reduce((sum, value) => sum + (value - mean(values)) ** 2, 0);

// How much of the group's spread of rewards a node's choice explains, less what it would by chance
// (omega squared): every choice of single members explains all of it.
function explained(node, total) {
  const branches = [...node.children.map((child) => child.members), ...(node.ended.length ? [node.ended] : [])].map((members) => members.map((each) => each.reward));
  const n = node.members.length, k = branches.length;
  if (k < 2 || n === k || !total) return 0;
  const within = branches.reduce((sum, rewards) => sum + squares(rewards), 0);
  const between = squares(node.members.map((each) => each.reward)) - within;
  return (between - ((k - 1) * within) / (n - k)) / total;
}

function tree(rows, rollouts) {
  const members = rows.map((row, index) => ({ row, reward: columns.reward[row], path: sampledFrom(rollouts[index]) }));
  const root = grow(members, 0), total = squares(members.map((each) => each.reward));
  let best = { share: 0 };
  const visit = (node) => {
    const share = explained(node, total);
    if (share > best.share) best = { node, share };
    node.children.forEach(visit);
  };
  visit(root);
  const spread = Math.max(...members.map((each) => Math.abs(each.reward - root.reward))) || 1;
  const said = best.node ? `Winners and losers part after token ${best.node.to}: that choice explains ${number(best.share * 100, 2)} % of the spread of the rewards.` : "No single choice explains the rewards.";
  return [el("p", { class: "hint" }, `${plural(rows.length, "sibling")}, mean reward ${number(root.reward, 3)}. ${said}`), el("ul", { class: "tree" }, branch(root, members.length, root.reward, spread, best.node))];
}

const RUN = 80; // tokens of a branch that are shown at first

function branch(node, all, average, spread, best) {
  const [{ path, row }] = node.members, gain = node.reward - average;
  const chips = [el("b", {}, `${node.members.length} of ${all}`), el("span", { title: "probability of the branch's first token under the sampling policy" }, `p ${number(node.p, 2)}`),
    el("span", { style: `background:${tint(gain < 0 ? "--neg" : "--pos", (Math.abs(gain) / spread) * (FULL - LEAST) + (gain ? LEAST : 0))}` }, `reward ${number(node.reward, 3)}`)];
  if (node.members.length === 1) chips.push(el("button", { onclick: () => { mode = "one"; drawHead(); select(row); } }, "open"));
  else if (node.ended.length) chips.push(el("span", {}, `${node.ended.length} end${node.ended.length > 1 ? "" : "s"} here`));
  if (node === best) chips.push(el("span", { class: "parting" }, "they part below"));
  const text = el("div", { class: "run" });
  const show = (to) => {
    const rest = node.to - to;
    text.replaceChildren(...(path.sample ? parts(path.sample, path.from + node.from, path.from + to, row, null, { left: RUN }) : []),
      rest > 0 ? el("button", { onclick: () => show(node.to) }, plural(rest, "more token")) : "");
  };
  show(Math.min(node.to, node.from + RUN));
  return el("li", { class: node === best ? "best" : null }, el("div", { class: "chips" }, ...chips), text, node.children.length ? el("ul", {}, ...node.children.map((child) => branch(child, all, average, spread, best))) : null);
}
