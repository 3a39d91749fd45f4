// All that the page says, in English and Chinese. {name} is filled in; a value may be an element.
"use strict";

const LANGUAGES = { en: "English", zh: "中文" };

const WORDS = {
  // The first screen.
  lead: [
    "A GPT of {size}. It runs inside this page: type, and everything below follows.",
    "一个 {size}的 GPT，就在本页中运行：输入文字，下面的一切随之变化。",
  ],
  leadRemote: [
    "A GPT of {size}. The server that gave this page runs it.",
    "一个 {size}的 GPT，由给出本页的服务器运行。",
  ],
  size: ["{weights} weights", "{weights} 个权重"],
  sizeTrained: ["{weights} weights after {step} steps", "{weights} 个权重、训练了 {step} 步"],
  toChat: ["chat", "对话"],
  toText: ["text", "文本"],
  toPath: ["path", "路径"],
  toKinds: ["heads", "头"],
  toCause: ["parts", "部件"],
  yourText: ["Your text", "你的文本"],
  generate: ["Generate", "生成"],
  pause: ["Pause", "暂停"],
  oneStep: ["One token", "一个词元"],
  stepBack: ["Take back", "退一步"],
  learn: ["Learn", "学习"],
  learnStep: ["One step", "学一步"],
  unlearn: ["Undo learning", "撤销学习"],
  learnHelp: ["Teach the model your text, and watch.", "让模型学你的文本，看它怎样变化。"],
  learnTooShort: ["One token is nothing to learn from.", "只有一个词元，没有什么可学。"],
  learnTooLarge: [
    "A page teaches models of up to {most} weights; this one has {weights}, and a step would take too long.",
    "本页最多能教 {most} 个权重的模型；这个模型有 {weights} 个，每一步都要等太久。",
  ],
  learned: [
    "Loss after {step} steps: {line} on your text (solid line), {opening} on the text that the page opened with (dashed). Where the dashed line rises, the model forgets.",
    "学了 {step} 步，损失：你的文本 {line}（实线），打开本页时的文本 {opening}（虚线）。虚线上升，就是模型在遗忘。",
  ],
  curveHelp: ["From 0 to {scale} nats per token.", "纵轴从 0 到 {scale}（每个词元的损失，单位奈特）。"],
  surpriseHelp: [
    "The stronger the color, the less the model expected the token.",
    "颜色越醒目，模型越没料到这个词元。",
  ],
  stepHeading: ["What the last step did", "最后一步做了什么"],
  gradientsHelp: [
    "How strongly the loss of your text pulls at each part (the length of its gradient):",
    "你的文本的损失对各部分的拉力有多大（梯度的长度）：",
  ],
  weightHelp: ["One weight: in the embedding of {token}, number {input}", "一个权重：{token} 的嵌入中的第 {input} 个数"],
  weightBefore: ["before", "之前"],
  weightGradient: ["gradient: if it grows by 1, the loss grows by about", "梯度：它增大 1，损失大约增大"],
  weightMean: ["mean of its gradients so far, the latest counting most", "至今各步梯度的均值，越近的权重越大"],
  weightRoot: ["root of the mean of their squares", "梯度平方的均值再开方"],
  weightRate: ["rate", "学习率"],
  weightAfter: ["after: shrunk a little, then moved against the mean", "之后：先缩小一点，再逆着均值移动"],
  learnUnlike: [
    "This is AdamW as PyTorch has it, with a small rate. gptmini train does otherwise: thousands of tokens of many texts in each step, Muon for matrices, a rate that rises and falls, and dropout where a text is short.",
    "这里用的是 PyTorch 的 AdamW，学习率较小。gptmini train 有所不同：每一步读许多文本的几千个词元，矩阵用 Muon，学习率先升后降，文本短时还用 dropout。",
  ],
  tokensHeading: ["What the model reads: {count} tokens", "模型读到的：{count} 个词元"],
  tokensHelp: [
    "Press a token to select it. ␣ is a space, ↵ a line break, ⇥ a tab.",
    "点按一个词元即可选中。␣ 是空格，↵ 是换行，⇥ 是制表符。",
  ],
  writtenHelp: ["The underlined ones were drawn by the model.", "带下划线的由模型抽取。"],
  bytesHelp: [
    "A box like ‹E4› is one byte of a character that takes several tokens.",
    "‹E4› 这样的方框是一个字符的一个字节，这个字符由几个词元组成。",
  ],
  specialHelp: ["{token} marks where a text begins and ends.", "{token} 标记文本的开头和结尾。"],
  contextHelp: ["It reads the last {count} tokens at most.", "最多读最后 {count} 个词元。"],
  spaceHelp: [
    "The space at the end is dropped: tokens begin with their own space.",
    "末尾的空格已略去：词元自带前面的空格。",
  ],
  openedHelp: ["The model wrote this. Replace it by yours.", "这段文本由模型写成。换成你的吧。"],
  heldOutHelp: [
    "This text is like the training text, but the model never read it. Replace it by yours.",
    "这段文本与训练文本相似，但模型从未读过。换成你的吧。",
  ],
  finished: {
    document: ["The model ended the text here.", "模型在此结束了文本。"],
    stop: ["The text ends here: a stop text of this run came.", "文本到此结束：出现了停止文本。"],
    context: ["The context is full: no token fits any more.", "上下文已满，放不下更多词元。"],
  },
  expectHeading: ["What comes after {token}?", "{token} 之后是什么？"],
  expectCame: [
    "Your text goes on with {token}: {chance}, rank {rank}.",
    "你的文本接着是 {token}：{chance}，排名第 {rank}。",
  ],
  expectOpen: ["The text ends here: “One token” adds the next.", "尚未写出：按“一个词元”抽取。"],
  barsHelp: [
    "{pale} expected, at temperature {temperature} {solid} chance to be drawn, after the filters",
    "{pale} 温度 {temperature} 下的预期 {solid} 过滤后被抽中的机会",
  ],
  barsHelpBefore: [" {before} with all on", " {before} 全部打开时"],
  noToken: ["No token is left to draw.", "没有可抽取的词元。"],
  settingsHeading: ["How the next token is drawn", "下一个词元如何抽取"],
  temperature: ["temperature", "温度"],
  top_k: ["top-k", "top-k"],
  top_p: ["top-p", "top-p"],
  min_p: ["min-p", "min-p"],
  ban: ["ban", "禁用"],
  isOff: ["off", "关"],
  temperatureHelp: ["Divides logits; 0 takes the likeliest.", "logits 除以它；0 取最可能者。"],
  top_kHelp: ["Keeps the k likeliest tokens.", "保留最可能的 k 个词元。"],
  top_pHelp: ["Keeps the likeliest that together reach p.", "保留概率之和达到 p 的最可能者。"],
  min_pHelp: [
    "Keeps tokens at least this share as likely as the likeliest.",
    "保留概率至少为最大者这一比例的词元。",
  ],
  seed: ["seed", "种子"],
  seedHelp: ["Another seed draws another text.", "换一个种子，抽出另一篇文本。"],

  // The path.
  pathHeading: ["The whole path", "完整路径"],
  pathHelp: [
    "For {token}, the selected token. Press a station to open it.",
    "选中的词元是 {token}。点按一站即可打开。",
  ],
  previousStation: ["◂ before", "◂ 上一站"],
  nextStation: ["next ▸", "下一站 ▸"],
  factsHeading: ["Shapes, formula and code", "形状、公式和代码"],
  layerName: ["layer {layer}", "第 {layer} 层"],
  wouldSay: ["would say {top}", "会说 {top}"],
  adds: ["adds {length}", "加上 {length}"],
  throughNorm: ["norm → {part}", "归一化 → {part}"],
  streamHelp: [
    "The blue line is the residual stream: {width} numbers for each token, to which every part adds; “adds” is the length of what it adds. “would say” is the guess if all later layers were skipped.",
    "蓝线是残差流：每个词元 {width} 个数，各部分都往上加；“加上”后面是所加向量的长度。“会说”是跳过后面所有层时的猜测。",
  ],
  ranks: [
    "Rank of {token}, from the embedding to the last layer: {ranks}.",
    "{token} 的排名，从嵌入到最后一层：{ranks}。",
  ],
  tiedHelp: [
    "Head and embedding are the same table here (tied), so at this place a token mostly predicts itself.",
    "这里的输出头和嵌入是同一张表（权重共享），所以词元在此多半预测它自己。",
  ],
  shape: ["Shapes", "形状"],
  formula: ["Formula", "公式"],
  code: ["In Python", "Python 代码"],
  eachNumber: ["each number", "每个数"],
  vectorFacts: [
    "{count} numbers, length {length}; a full bar is ±{scale}",
    "{count} 个数，长度 {length}；满格为 ±{scale}",
  ],
  inText: ["token {place}", "第 {place} 个词元"],

  textFacts: [
    "{characters} characters = {bytes} bytes → {tokens} tokens.",
    "{characters} 个字符 = {bytes} 个字节 → {tokens} 个词元。",
  ],
  tokens: ["tokens", "词元"],
  tokensPlain: [
    "The model sees no letters. The tokenizer cuts your text into tokens that it knows, and each has a number. The model reads only these numbers; there are {vocabulary} of them.",
    "模型看不到字母。分词器把你的文本切成它认识的词元，每个词元有一个编号。模型只读这些编号，一共有 {vocabulary} 个。",
  ],
  tokenizerBpe: [
    "The tokens were learned from a text: the commonest pairs of neighbors were merged, again and again (byte-pair encoding).",
    "词元学自文本：一再合并最常见的相邻对（字节对编码）。",
  ],
  tokenizerByte: ["Here each byte is a token.", "这里每个字节是一个词元。"],
  tokenizerChar: ["Here each character is a token.", "这里每个字符是一个词元。"],
  embed: ["embedding", "嵌入"],
  embedPlain: [
    "The number of a token picks a row of a table: {width} learned numbers, which mean this token wherever it stands.",
    "词元的编号选出表中的一行：{width} 个学得的数，无论它在何处都代表这个词元。",
  ],
  embedLearned: ["A second table, of positions, is added.", "再加上另一张表中该位置的行。"],
  embedLater: ["Positions come later, in attention.", "位置在后面的注意力中加入。"],
  embedVector: ["row of {token}", "{token} 的行"],
  positionVector: ["row of position {place}", "位置 {place} 的行"],
  normPlain: [
    "Whatever the stream has grown to, a norm brings its numbers to about 1 before they are read: divided by {root}, then times learned weights.",
    "无论残差流变得多大，读取之前归一化都把它的数调到 1 左右：除以 {root}，再乘学得的权重。",
  ],
  addPlain: [
    "What the part makes of them is added to the stream. Nothing is replaced: later parts still read what was there.",
    "这一部分算出的东西加到残差流上。没有东西被替换：后面的部分仍能读到原有内容。",
  ],
  streamHeading: ["The stream before and after", "之前和之后的残差流"],
  streamBefore: ["before", "之前"],
  streamAfter: ["after", "之后"],
  head: ["head", "输出头"],
  headPlain: [
    "The stream is compared with a row of numbers for each of the {vocabulary} tokens. The product is the token's logit: the larger, the likelier.",
    "残差流与 {vocabulary} 个词元各自的一行数相乘。乘积是该词元的 logit：越大越可能。",
  ],
  headTied: ["The rows are those of the embedding (tied).", "这些行就是嵌入的行（权重共享）。"],
  softmaxPlain: [
    "Softmax makes probabilities of the logits: e to the power of each, divided by their sum (here at temperature {temperature}). The largest:",
    "Softmax 把 logits 变成概率：各取 e 的幂，再除以总和（此处温度为 {temperature}）。最大的：",
  ],
  draw: ["draw", "抽取"],
  drawPlain: [
    "A random number between 0 and 1 chooses the token: the chances that the filters left stand side by side, and the number falls into one of them.",
    "0 到 1 之间的随机数选出词元：过滤后剩下的机会并排而立，随机数落入其中之一。",
  ],
  drawNumber: [
    "The number is {random}: {token}. It depends on seed {seed} and on how many tokens were drawn before ({count}).",
    "随机数为 {random}：{token}。它取决于种子 {seed} 和此前已抽取的个数（{count}）。",
  ],
  drawGreedy: ["Temperature 0 takes the likeliest: {token}.", "温度 0 取最可能的：{token}。"],
  drawTyped: [
    "The next token was in your text, so nothing is drawn here. Select the last token.",
    "下一个词元在你的文本中，这里不抽取。请选最后一个词元。",
  ],

  // Attention.
  attn: ["attention", "注意力"],
  attentionPlain: [
    "The only place where tokens see each other. Each of {heads} heads looks back from the selected token, weighs the earlier ones, and brings a mix of what they offer.",
    "词元彼此看见的唯一地方。{heads} 个头各自从选中的词元回看，给前面的词元加权，带回它们所提供内容的混合。",
  ],
  windowHelp: ["It sees {count} tokens at most.", "最多看见 {count} 个词元。"],
  sharedHelp: ["Heads {heads} share their keys and values.", "头 {heads} 共用键和值。"],
  headName: ["head {head}", "头 {head}"],
  layerHead: ["layer {layer}, head {head}", "第 {layer} 层，头 {head}"],
  switchOff: ["switch off", "关闭"],
  mapHeading: ["Layer {layer}, head {head}: who looks at whom", "第 {layer} 层，头 {head}：谁看谁"],
  mapHelp: [
    "A row looks, a column is looked at; the darker (in dark mode: the lighter), the more. Colors follow the square root of the weight. Press a cell, or use the arrow keys. Columns: the same tokens, left to right.",
    "行是看者，列是被看者，列的顺序与行相同；颜色越深（深色模式下越浅）权重越大，颜色按权重的平方根。点按一格，或用方向键。",
  ],
  mapCell: ["{query} looks at {key}: {weight}", "{query} 看 {key}：{weight}"],
  mapBlind: ["{query} cannot see {key}", "{query} 看不到 {key}"],
  readsHeading: ["What {token} reads in this head", "{token} 在这个头中读什么"],
  stepsHeading: ["Step by step, from {query} to {key}", "从 {query} 到 {key}，一步一步"],
  qkvHeading: ["1. Query, key, value", "1. 查询、键、值"],
  qkvPlain: [
    "Three products with learned matrices. The query says what the token looks for, the key what a token can be found by, the value what it then passes on.",
    "与学得的矩阵相乘三次。查询说明词元在找什么，键说明凭什么能找到一个词元，值是它随后传出的内容。",
  ],
  qkNormHelp: [
    "Query and key are normed to a mean square of 1, times learned weights (QK-norm).",
    "查询和键归一化到均方为 1，再乘学得的权重（QK-norm）。",
  ],
  queryOf: ["q of {token}", "{token} 的 q"],
  keyOf: ["k of {token}", "{token} 的 k"],
  valueOf: ["v of {token}", "{token} 的 v"],
  positionHeading: ["2. Position", "2. 位置"],
  ropePlain: [
    "RoPE turns pairs of numbers by an angle that grows with the position, so that a product depends on the distance.",
    "RoPE 把成对的数旋转一个随位置增长的角度，于是乘积取决于距离。",
  ],
  alibiPlain: [
    "ALiBi takes from each score the distance times the slope of this head, {slope}: the farther, the less.",
    "ALiBi 从每个分数中减去距离乘以这个头的斜率 {slope}：越远越小。",
  ],
  learnedPlain: ["Positions were added to the embeddings already.", "位置已加到嵌入中。"],
  nonePlain: ["Only the mask tells before from after.", "只有掩码区分先后。"],
  scoreHeading: ["3. The score: q·k, number by number", "3. 分数：逐个数相乘的 q·k"],
  scorePlain: ["The products of query and key sum to {sum}.", "查询与键的乘积之和为 {sum}。"],
  productVector: ["q·k, product by product", "q·k 的各个乘积"],
  tableHeading: ["4. From scores to weights", "4. 从分数到权重"],
  tablePlain: [
    "The sum is divided by √{size} = {root}, keys that must not be seen get −∞, and softmax makes weights that sum to 1.",
    "总和除以 √{size} = {root}，不可见的键得 −∞，softmax 使权重之和为 1。",
  ],
  key: ["key", "键"],
  bias: ["distance", "距离"],
  score: ["score", "分数"],
  weight: ["weight", "权重"],
  itself: ["itself", "自己"],
  cutHere: ["cut {query} → {key} in this head", "在此头中切断 {query} → {key}"],
  cutAll: ["cut it in all heads of all layers", "在所有层的所有头中切断"],
  sumHeading: ["5. The weighted sum of the values", "5. 值的加权和"],
  sumPlain: ["Each value times its weight, summed:", "每个值乘以其权重再求和："],
  weightedValue: ["{weight} × v of {token}", "{weight} × {token} 的 v"],
  mixedVector: ["the sum", "总和"],
  outHeading: ["6. What it adds", "6. 它加上什么"],
  outPlain: [
    "o_proj turns the sum into {width} numbers for the residual stream. Added straight to the logits, they would raise and lower these tokens most, beside the mean of all (of tokens with at least 0.001 % here):",
    "o_proj 把总和变成残差流的 {width} 个数。若直接加到 logits，相对于所有词元的均值，以下词元升降最多（只看此处至少有 0.001 % 的词元）：",
  ],
  outVector: ["added by this head", "这个头加上的"],
  headIsOff: ["This head is switched off: it adds nothing.", "这个头已关闭：什么也不加。"],
  raises: ["raises", "升高"],
  lowers: ["lowers", "降低"],

  // The MLP.
  mlp: ["MLP", "MLP"],
  mlpPlain: [
    "It looks at one token alone. {count} inner neurons each test for something in the stream; those that fire add their vector to it.",
    "它只看一个词元。{count} 个内部神经元各自检测残差流中的某种东西；激活的神经元把自己的向量加上去。",
  ],
  neuronsHeading: ["Neurons that add most for {token}", "对 {token} 贡献最大的神经元"],
  neuron: ["neuron", "神经元"],
  fires: ["fires", "激活"],
  firesMost: ["most on", "在文中最强处"],
  neuronHeading: ["Neuron {neuron} over the text", "神经元 {neuron} 在全文中"],

  cachePlain: [
    "Keys and values never change, so they are kept for the next token (the KV cache): for each token 2 × {heads} KV heads × {size} = {count} numbers in this layer.",
    "键和值不会再变，所以为下一个词元保留下来（KV 缓存）：本层每个词元 2 × {heads} 个 KV 头 × {size} = {count} 个数。",
  ],

  // Heads by what they do.
  kindsHeading: ["Heads by what they do", "各个头做什么"],
  kindsHelp: [
    "Found on your text: the mean weight that each head gives to the previous token, to the first (where heads park unused weight) and to the token itself; in a text that repeats itself, also to what followed the same token before (induction). Press a head to open it.",
    "根据你的文本：每个头给前一个词元、第一个词元（头把用不上的权重放在那里）和词元自己的平均权重；文本有重复时，还有给同一词元上次出现后紧跟着的词元的权重（归纳）。点按一个头即可打开。",
  ],
  previous: ["previous", "前一个"],
  first: ["first", "第一个"],
  induction: ["induction", "归纳"],

  // Cause.
  causeHeading: ["Switch parts off, or swap them", "关闭或替换部件"],
  otherHeading: ["A second text, if you like", "另一篇文本（可不填）"],
  otherHelp: [
    "With it, a part that is off is replaced by its output on the second text (activation patching), position by position: both texts should have equally many tokens. Here {here}, there {there}.",
    "填入后，关闭的部件换成它在另一篇文本中同一位置的输出（激活修补），所以两篇的词元数应相等。这里 {here} 个，那里 {there} 个。",
  ],
  causeHelp: [
    "Press a part to switch it off: the bar at the bottom shows how the prediction changes. The number is what the part adds directly to the logit of {token}, relative to the mean token (blue raises, orange lowers).",
    "点按一个部件将其关闭，页面底部的一栏显示预测如何变化。数字是该部件直接加到 {token} 的 logit 上的量，相对于所有词元的平均（蓝色升高，橙色降低）。",
  ],
  causeSum: [
    "embedding {embedding} + position {position} + heads {heads} + MLPs {mlps} + biases {biases} = logit {logit} − mean of all logits ({mean})",
    "嵌入 {embedding} + 位置 {position} + 头 {heads} + MLP {mlps} + 偏置 {biases} = logit {logit} − 所有 logit 的均值（{mean}）",
  ],
  wholeLayer: ["whole layer", "整层"],
  allHeads: ["all heads", "所有头"],
  offNow: ["Off:", "已关闭："],
  offTaken: ["From the second text:", "取自另一篇文本："],
  allOn: ["all on", "全部打开"],
  changed: ["{token} next: {before} → {after}", "下一个是 {token}：{before} → {after}"],
  foot: [
    "Made by gptmini. Everything is in this file; it loads nothing and sends nothing. Next: docs/tour.md explains every station of the path, scripts/nano.py is the code from top to bottom, and gptmini train --data my.txt --minutes 10 trains a model on your own text, for a page like this.",
    "由 gptmini 制作。一切都在这个文件中；不加载也不发送任何东西。接下来：docs/tour.zh.md 讲解路径上的每一站，scripts/nano.py 是从头到尾的代码，gptmini train --data my.txt --minutes 10 用你自己的文本训练一个模型，再写出这样一页。",
  ],
  footServed: [
    "Made by gptmini. This page talks to the server that gave it, and to nobody else.",
    "由 gptmini 制作。本页只与给出它的服务器通信，不联系其他任何地方。",
  ],

  // With a server.
  serverGone: ["The server does not answer. Is it running?", "服务器没有回应。它还在运行吗？"],
  refused: ["The server refused this (status {status}).", "服务器拒绝了请求（状态 {status}）。"],
  chatHeading: ["Chat", "对话"],
  chatHelp: ["Enter sends, Shift+Enter breaks the line.", "Enter 发送，Shift+Enter 换行。"],
  yourMessage: ["Your message", "你的消息"],
  user: ["You", "你"],
  assistant: ["Model", "模型"],
  send: ["Send", "发送"],
  stop: ["Stop", "停止"],
  newChat: ["New conversation", "新对话"],
  answerCut: ["The answer ends here: there is no room for more.", "放不下更多，回答到此为止。"],
};

let language = navigator.language.startsWith("zh") ? "zh" : "en";

/** What the page says under a key, as a list of strings and of the elements among `values`. */
function say(key, values = {}) {
  const entry = key.split(".").reduce((words, part) => words[part], WORDS);
  const sentence = entry[Object.keys(LANGUAGES).indexOf(language)];
  const parts = sentence.split(/\{(\w+)\}/);
  // Of one thing the word behind the number has no s: "1 step".
  const count = (part, i) =>
    String(values[parts[i - 1]]) === "1" ? part.replace(/^( \w{3,})s\b/, "$1") : part;
  return parts.map((part, i) => (i % 2 ? values[part] : count(part, i)));
}

/** The same as one string, for attributes; elements give their text. */
function sayText(key, values) {
  const parts = say(key, values).flat(Infinity);
  return parts.map((part) => part?.textContent ?? part).join("");
}
